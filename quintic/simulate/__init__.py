"""Plans for meshes of ranks that need not exist."""
