"""Attention within documents and windows, and the largest logit of each head."""
