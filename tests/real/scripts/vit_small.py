"""vit-pytorch: its ViT for small data sets (shifted patches; einops throughout), dropout."""

import torch
from common import device, options
from vit_pytorch.vit_for_small_dataset import ViT

args = options(16)
gpu = device()
model = ViT(
    image_size=64,
    patch_size=8,
    num_classes=10,
    dim=192,
    depth=3,
    heads=4,
    mlp_dim=384,
    dropout=0.1,
    emb_dropout=0.1,
).to(gpu)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.rand(640, 3, 64, 64), torch.randint(10, (640,)))
for images, labels in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
    loss = torch.nn.functional.cross_entropy(model(images.to(gpu)), labels.to(gpu))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
