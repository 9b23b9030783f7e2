"""Step time: kernels on a GPU, launched by a CPU; and the rates of both, measured."""
