"""Update rules and sums: pure functions on tensors, free of names and ranks."""
