"""Which update rule learns most from the same tokens? See `__main__.py`."""
