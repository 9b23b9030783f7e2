import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

backbone = nn.Linear(64, 64).cuda()
head = nn.Linear(64, 10).cuda()
optimizer = torch.optim.Adam(head.parameters())


@torch.inference_mode()
def features(x):
    return backbone(x)


data = TensorDataset(torch.rand(640, 64), torch.randint(0, 10, (640,)))
for x, y in DataLoader(data, batch_size=32):
    loss = F.cross_entropy(head(features(x.cuda())), y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
