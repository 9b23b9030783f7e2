import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

generator = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 784), nn.Tanh()).cuda()
critic = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1)).cuda()
for_generator = torch.optim.Adam(generator.parameters(), lr=2e-4)
for_critic = torch.optim.Adam(critic.parameters(), lr=2e-4)
loss_function = nn.BCEWithLogitsLoss()
for _ in range(5):
    for (x,) in DataLoader(TensorDataset(torch.rand(6400, 784)), batch_size=64, shuffle=True):
        x = x.cuda()
        real, made = torch.ones(len(x), 1).cuda(), torch.zeros(len(x), 1).cuda()
        fake = generator(torch.randn(len(x), 64).cuda())
        loss = loss_function(critic(x), real) + loss_function(critic(fake.detach()), made)
        loss.backward()
        for_critic.step()
        for_generator.zero_grad()
        loss_function(critic(fake), real).backward()
        for_generator.step()
