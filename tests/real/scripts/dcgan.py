"""A DCGAN as PyTorch's tutorial describes it: two networks, two Adams, images saved."""

import torch
import torchvision
from common import device, options
from torch import nn

args = options(32)
gpu = device()


def block(make, ins, outs, *more):
    return (make(ins, outs, 4, *more, bias=False), nn.BatchNorm2d(outs), nn.ReLU(True))


up, down = nn.ConvTranspose2d, nn.Conv2d
generator = nn.Sequential(
    *block(up, 64, 128, 1, 0), *block(up, 128, 64, 2, 1), *block(up, 64, 32, 2, 1),
    up(32, 3, 4, 2, 1, bias=False), nn.Tanh(),
).to(gpu)  # fmt: skip
critic = nn.Sequential(
    *block(down, 3, 32, 2, 1), *block(down, 32, 64, 2, 1), *block(down, 64, 128, 2, 1),
    down(128, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
).to(gpu)  # fmt: skip
loss_of = nn.BCELoss()
of_critic = torch.optim.Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
of_generator = torch.optim.Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
data = torchvision.datasets.FakeData(320, (3, 32, 32), transform=torchvision.transforms.ToTensor())
fixed = torch.randn(16, 64, 1, 1, device=gpu)
for epoch in range(2):
    for real, _ in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
        real = real.to(gpu)
        ones, zeros = torch.ones(len(real), device=gpu), torch.zeros(len(real), device=gpu)
        critic.zero_grad()
        loss_of(critic(real).view(-1), ones).backward()
        fake = generator(torch.randn(len(real), 64, 1, 1, device=gpu))
        loss_of(critic(fake.detach()).view(-1), zeros).backward()
        of_critic.step()
        generator.zero_grad()
        error = loss_of(critic(fake).view(-1), ones)
        error.backward()
        of_generator.step()
        print(f"{error.item():.3f}")
    torchvision.utils.save_image(generator(fixed).detach().cpu(), f"fake{epoch}.png")
    torch.save(generator.state_dict(), f"generator{epoch}.pth")
