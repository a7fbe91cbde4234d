"""Steps buckets whose optimizer state is in host memory (`offload=True`)."""
