"""Video: torchvision's R3D-18 on clips of eight frames, SGD in half precision with a scaler."""

import torch
import torchvision
from common import device, options

args = options(4)
gpu = device()
model = torchvision.models.video.r3d_18(num_classes=6).to(gpu)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
scaler = torch.amp.GradScaler(gpu.type, enabled=gpu.type == "cuda")
data = torch.utils.data.TensorDataset(torch.randn(96, 3, 8, 32, 32), torch.randint(6, (96,)))
for clips, labels in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
    with torch.autocast(gpu.type, torch.float16, enabled=gpu.type == "cuda"):
        loss = torch.nn.functional.cross_entropy(model(clips.to(gpu)), labels.to(gpu))
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
