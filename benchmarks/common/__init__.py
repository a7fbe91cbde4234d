"""Functions that several benchmarks share."""
