"""The plan of a step: buckets, their order, their memory."""
