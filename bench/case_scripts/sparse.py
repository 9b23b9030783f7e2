import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(1024, 64), torch.randint(0, 10, (1024,)))
model = nn.EmbeddingBag(50_000, 64, sparse=True).cuda()
head = nn.Linear(64, 10).cuda()
sparse = torch.optim.SparseAdam(model.parameters())
dense = torch.optim.Adam(head.parameters())
for _, y in DataLoader(data, 32):
    tokens = torch.randint(0, 50_000, (len(y), 20), device="cuda")
    loss = nn.functional.cross_entropy(head(model(tokens)), y.cuda())
    sparse.zero_grad()
    dense.zero_grad()
    loss.backward()
    sparse.step()
    dense.step()
