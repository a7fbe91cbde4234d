"""Side-by-side measurements, run from the repository's root: `python -m benchmarks.NAME --help`."""
