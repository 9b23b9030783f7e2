"""How long a step takes: kernels on a GPU, launched by a CPU."""
