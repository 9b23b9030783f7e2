"""What comes with `torch.compile`: Triton's kernels, flex_attention."""
