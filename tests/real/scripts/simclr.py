"""lightly's SimCLR: two augmented views, a projection head, NT-Xent."""

import torch
import torchvision
from common import device, options
from lightly.loss import NTXentLoss
from lightly.models.modules import SimCLRProjectionHead
from lightly.transforms import SimCLRTransform

args = options(16)
gpu = device()
net = torchvision.models.resnet18()
model = torch.nn.Sequential(
    *list(net.children())[:-1], torch.nn.Flatten(), SimCLRProjectionHead(512, 512, 128)
).to(gpu)
loss_of = NTXentLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=0.06, momentum=0.9)
data = torchvision.datasets.FakeData(512, (3, 48, 48), transform=SimCLRTransform(32))
for (first, second), _ in torch.utils.data.DataLoader(
    data, args.batch_size, shuffle=True, drop_last=True
):
    loss = loss_of(model(first.to(gpu)), model(second.to(gpu)))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
