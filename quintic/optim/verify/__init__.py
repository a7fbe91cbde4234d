"""A step checked against a reference."""
