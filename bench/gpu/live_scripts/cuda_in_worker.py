import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class OnGpu(Dataset):
    def __len__(self):
        return 1000

    def __getitem__(self, index):
        return torch.randn(64).cuda()


model = nn.Linear(64, 10).cuda()
optimizer = torch.optim.AdamW(model.parameters())
for x in DataLoader(OnGpu(), batch_size=8, num_workers=2):
    loss = model(x).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
