"""Memory snapshots that PyTorch wrote on a real GPU: read, replayed, explained."""
