"""Upper bounds of the temporary memory of a bucket's step, phase by phase."""
