"""The memory that the work on a bucket takes, stage by stage."""
