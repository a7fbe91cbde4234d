"""State of parameters: names, dtypes, where it is, and which rank owns it."""
