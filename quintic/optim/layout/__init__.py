"""Which matrices a parameter is made of, and which boxes of it lie where."""
