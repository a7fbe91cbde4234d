"""Deprecated: the package is `quintic.simulate` now."""
