"""Communication: collectives, groups of ranks, channels. The only user of torch.distributed."""
