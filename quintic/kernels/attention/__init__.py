"""Attention over documents, and the largest logits of its heads."""
