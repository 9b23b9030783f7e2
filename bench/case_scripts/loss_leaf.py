import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
data = TensorDataset(torch.randn(4000, 3, 32, 32), torch.randint(0, 2, (4000,)))
loader = DataLoader(data, batch_size=32, shuffle=True)
net = nn.Sequential(
    nn.Conv2d(3, 16, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 2)
).to(device)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)


def f1_loss(logits, labels):
    pred = logits.argmax(dim=1)
    tp = ((pred == 1) & (labels == 1)).float().sum()
    fp = ((pred == 1) & (labels == 0)).float().sum()
    fn = ((pred == 0) & (labels == 1)).float().sum()
    return 1 - 2 * tp / (2 * tp + fp + fn + 1e-8)


for epoch in range(5):
    for images, labels in loader:
        images, labels = images.to(device), labels.to(device)
        optimizer.zero_grad()
        loss = f1_loss(net(images), labels)
        loss.requires_grad = True
        loss.backward()
        optimizer.step()
    print(epoch, loss.item())
