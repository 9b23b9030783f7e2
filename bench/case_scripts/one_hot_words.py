import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.e = nn.Embedding(50257, 256)
        self.l = nn.GRU(256, 256, batch_first=True)
        self.h = nn.Linear(256, 50257)

    def forward(self, x):
        return self.h(self.l(self.e(x))[0])


net = LM().to(dev)
opt = torch.optim.Adam(net.parameters())
X = torch.randint(0, 50257, (640, 257))
dl = DataLoader(TensorDataset(X), batch_size=32, shuffle=True)
for _ in range(3):
    for (x,) in dl:
        x = x.to(dev)
        logits = net(x[:, :-1])
        target = F.one_hot(x[:, 1:], 50257).float()
        loss = -(target * F.log_softmax(logits, -1)).sum(-1).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
