"""Whole training steps, with one optimizer after the other."""
