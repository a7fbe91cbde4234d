"""What do fewer bytes of state cost, and what do they save? See `__main__.py`."""
