"""Sound events: short-time Fourier transforms on the GPU, a convolutional network."""

import torch
from common import device, options
from torch import nn

args = options(16)
gpu = device()
model = nn.Sequential(
    nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
    nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
    nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10),
).to(gpu)  # fmt: skip
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(1024, 8000), torch.randint(10, (1024,)))
window = torch.hann_window(400, device=gpu)
for waves, labels in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
    spectra = torch.stft(waves.to(gpu), 400, 160, window=window, return_complex=True)
    images = torch.log1p(spectra.abs())[:, None]
    loss = nn.functional.cross_entropy(model(images), labels.to(gpu))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
