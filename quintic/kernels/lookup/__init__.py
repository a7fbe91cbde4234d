"""Lookup layers: attention of each position over its token's rows of a table, and gradients of embeddings."""
