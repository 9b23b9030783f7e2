import torch
from torch import nn

model = nn.Sequential(nn.Linear(512, 8192), nn.ReLU(), nn.Linear(8192, 10)).cuda()
optimizer = torch.optim.AdamW(model.parameters())


def evaluate():
    model.eval()
    everything = torch.randn(3_000_000, 512, device="cuda")
    with torch.no_grad():
        return model(everything).argmax(-1)


for _step in range(60):
    x, y = torch.randn(512, 512, device="cuda"), torch.randint(10, (512,), device="cuda")
    loss = nn.functional.cross_entropy(model(x), y)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
evaluate()
