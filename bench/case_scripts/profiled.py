"""PyTorch's profiler with stacks looks for self in the frames of modules."""

import torch
from common import Images, batches, train

with torch.profiler.profile(with_stack=True):
    train(batches(Images()), steps=10)
