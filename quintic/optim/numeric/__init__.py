"""Arithmetic on tensors with defined bits: sums, precisions, numbers. Pure functions that know no rule or rank."""
