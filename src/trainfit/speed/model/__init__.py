"""Step time: kernels on a GPU, launched by a CPU."""
