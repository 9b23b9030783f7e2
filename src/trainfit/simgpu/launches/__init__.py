"""The kernels that an operator launches: their kind, FLOPs and bytes, and the log of them."""
