"""What scripts do that makes their memory grow, or vary; the option names the habit."""

import argparse
import collections

import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--habit", default="none")
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--steps", type=int, default=1000)
parser.add_argument("--width", type=int, default=256)
parser.add_argument("--head", type=int, default=64)
options = parser.parse_args()
habits = options.habit.split("+")


def samples(batch):
    longest = 8 + max(int(each) * 37 % 101 for each in batch) if "variable" in habits else 32
    return torch.ones(len(batch), longest, options.width)


model = torch.nn.Sequential(
    torch.nn.Linear(options.width, options.width),
    torch.nn.GELU(),
    torch.nn.Linear(options.width, options.head),
).cuda()
optimizer = torch.optim.AdamW(model.parameters())
kept, recent = [], collections.deque(maxlen=3)
history = torch.zeros(1, options.head, device="cuda")
total = torch.zeros((), device="cuda")
loader = DataLoader(range(100_000), options.batch_size, collate_fn=samples)
for step, batch in enumerate(loader):
    if step == options.steps:
        break
    output = model(batch.cuda())
    loss = output.square().mean()
    if "graph" in habits:
        total = total + loss  # its graph holds on to all graphs before
        loss.backward(retain_graph=True)
    else:
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if "losses" in habits:
        kept.append(loss)
    if "outputs" in habits:
        kept.append(output.detach())
    if "history" in habits:
        history = torch.cat([history, output.detach()[:, 0]])
    if "recent" in habits:
        recent.append(output.detach())
    if "alternate" in habits:
        kept = [output.detach()] if step % 2 else []
