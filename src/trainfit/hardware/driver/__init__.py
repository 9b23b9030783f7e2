"""The GPUs of this machine as NVIDIA's driver, the kernel and PyTorch see them."""
