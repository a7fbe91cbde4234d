"""Attention of each position over the rows that belong to its token."""
