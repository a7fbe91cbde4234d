"""State in host memory while it is stepped."""
