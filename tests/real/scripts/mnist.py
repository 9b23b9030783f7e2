"""A small convolutional network on images of digits' size, with Adadelta, test and checkpoint."""

import torch
from common import device, options
from torch import nn

args = options(64)
gpu = device()
model = nn.Sequential(
    nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2),
    nn.Dropout(0.25), nn.Flatten(), nn.Linear(9216, 128), nn.ReLU(), nn.Dropout(0.5),
    nn.Linear(128, 10), nn.LogSoftmax(1),
).to(gpu)  # fmt: skip
optimizer = torch.optim.Adadelta(model.parameters(), lr=1.0)


def loader(count, **more):
    rows = torch.utils.data.TensorDataset(torch.rand(count, 1, 28, 28), torch.arange(count) % 10)
    return torch.utils.data.DataLoader(rows, **more)


train, test = loader(3840, batch_size=args.batch_size, shuffle=True), loader(500, batch_size=500)
for epoch in range(2):
    model.train()
    for index, (x, y) in enumerate(train):
        x, y = x.to(gpu), y.to(gpu)
        optimizer.zero_grad()
        loss = nn.functional.nll_loss(model(x), y)
        loss.backward()
        optimizer.step()
        if index % 10 == 0:
            print(f"epoch {epoch} [{index * len(x)}/{len(train.dataset)}] loss {loss.item():.4f}")
    model.eval()
    with torch.no_grad():
        right = sum((model(x.to(gpu)).argmax(1) == y.to(gpu)).sum().item() for x, y in test)
    print(f"accuracy {right}/{len(test.dataset)}")
    torch.save(model.state_dict(), "mnist.pt")
