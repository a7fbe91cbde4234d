"""The README's chart and its table of figures: what they show is measured and written by one command."""
