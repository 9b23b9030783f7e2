"""The memory of one forward pass of ResNet-18, as a script prints it: before and after."""

import torch
import torchvision

model = torchvision.models.resnet18().cuda()
image = torch.randn(1, 3, 256, 256).cuda()
before = torch.cuda.memory_allocated()
output = model(image)
after = torch.cuda.memory_allocated()
print(f"forward pass: {before} -> {after} bytes, reserved {torch.cuda.memory_reserved()}")
