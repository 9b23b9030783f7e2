"""A model of PyTorch's CUDA caching allocator, and of the workspaces of GPU libraries."""
