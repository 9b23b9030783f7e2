import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(1000, 64)
        self.lstm = nn.LSTM(64, 64, batch_first=True)
        self.out = nn.Linear(64, 7)

    def forward(self, x):
        return self.out(self.lstm(self.emb(x))[0])


model = Tagger().cuda()
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.Adam(model.parameters())
data = TensorDataset(torch.randint(0, 1000, (640, 20)), torch.randint(0, 7, (640, 20)))
for x, y in DataLoader(data, batch_size=32):
    out = model(x.cuda())
    loss = criterion(out, y.cuda())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
