"""Whole training runs: their quality, their speed, a first day with them."""
