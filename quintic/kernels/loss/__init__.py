"""Soft-capped cross entropy from hidden states."""
