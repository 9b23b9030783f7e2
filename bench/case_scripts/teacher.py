import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def network(width):
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10),
    ).to("cuda")  # fmt: skip


student, teacher = network(16), network(256)
teacher.eval()
optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
data = TensorDataset(torch.rand(640, 3, 64, 64), torch.randint(0, 10, (640,)))
for _ in range(5):
    for x, y in DataLoader(data, batch_size=32, shuffle=True):
        x, y = x.to("cuda"), y.to("cuda")
        out, wanted = student(x), teacher(x).detach()
        loss = F.cross_entropy(out, y) + F.mse_loss(out, wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
