"""What a script sees of the device: ``torch.cuda``, streams, graphs, clocks."""
