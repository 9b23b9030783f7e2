"""Memory that the GPU kernels of an operator allocate, and the libraries that they are from."""
