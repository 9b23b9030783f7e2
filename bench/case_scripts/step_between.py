import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(640, 20, 32), torch.randint(0, 5, (640,)))
lstm, head = nn.LSTM(32, 64, batch_first=True).cuda(), nn.Linear(64, 5).cuda()
opt = torch.optim.Adam([*lstm.parameters(), *head.parameters()])
for x, y in DataLoader(data, 32):
    out, _ = lstm(x.cuda())
    loss = nn.functional.cross_entropy(head(out[:, -1]), y.cuda())
    opt.zero_grad()
    loss.backward(retain_graph=True)
    opt.step()
    (0.1 * loss).backward()
    opt.step()
