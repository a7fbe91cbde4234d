"""Every kernel alone."""
