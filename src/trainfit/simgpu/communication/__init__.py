"""``torch.distributed`` for one simulated rank: process groups and collectives."""
