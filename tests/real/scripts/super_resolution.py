"""Super-resolution: convolutions and a pixel shuffle, L1 loss, kornia's augmentation and SSIM."""

import kornia
import torch
from common import device, options
from torch import nn

args = options(8)
gpu = device()
model = nn.Sequential(
    nn.Conv2d(3, 64, 5, padding=2), nn.Tanh(), nn.Conv2d(64, 32, 3, padding=1), nn.Tanh(),
    nn.Conv2d(32, 12, 3, padding=1), nn.PixelShuffle(2),
).to(gpu)  # fmt: skip
more = kornia.augmentation.AugmentationSequential(
    kornia.augmentation.RandomHorizontalFlip(p=0.5),
    kornia.augmentation.RandomAffine(15.0, p=0.5),
    kornia.augmentation.ColorJiggle(0.1, 0.1, 0.1, 0.1, p=0.5),
).to(gpu)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.rand(512, 3, 64, 64))
for (fine,) in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
    fine = more(fine.to(gpu))
    coarse = nn.functional.interpolate(fine, scale_factor=0.5, mode="bilinear")
    guess = model(coarse)
    loss = nn.functional.l1_loss(guess, fine) + kornia.losses.ssim_loss(guess, fine, 5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
