"""Communication: collectives, groups of ranks. The only user of torch.distributed."""
