"""Inference: features of images with a timm model, written to a file."""

import timm
import torch
from common import device, options

args = options(32)
gpu = device()
model = timm.create_model("resnet26", num_classes=0).to(gpu).eval()
images = torch.utils.data.TensorDataset(torch.rand(256, 3, 64, 64))
found = []
with torch.inference_mode():
    for (batch,) in torch.utils.data.DataLoader(images, args.batch_size):
        found.append(model(batch.to(gpu)).cpu())
torch.save(torch.cat(found), "features.pt")
