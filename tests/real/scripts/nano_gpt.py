"""A GPT as small training repositories have it: batches cut from a file of tokens (no DataLoader),
micro-steps in bfloat16, clipped gradients, fused AdamW with two groups, checkpoints."""

import math
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch
from common import device, options
from torch import nn

args = options(12, accumulate=5, block=128)
gpu = device()
WIDTH, HEADS, LAYERS, WORDS = 256, 4, 4, 4096
if not Path("train.bin").exists():
    np.random.default_rng(0).integers(0, WORDS, 200_000, dtype=np.uint16).tofile("train.bin")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, x):
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.second(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(args.block, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x, y):
        hidden = self.words(x) + self.places(torch.arange(x.shape[1], device=x.device))
        logits = self.head(self.last(self.blocks(hidden)))
        return nn.functional.cross_entropy(logits.view(-1, WORDS), y.reshape(-1))


def batch():
    data = np.memmap("train.bin", dtype=np.uint16, mode="r")
    starts = torch.randint(len(data) - args.block - 1, (args.batch_size,))
    rows = [torch.from_numpy(data[i : i + args.block + 1].astype(np.int64)) for i in starts]
    rows = torch.stack(rows)
    if gpu.type == "cuda":
        rows = rows.pin_memory().to(gpu, non_blocking=True)
    return rows[:, :-1], rows[:, 1:]


model = GPT().to(gpu)
decayed = [p for p in model.parameters() if p.dim() >= 2]
others = [p for p in model.parameters() if p.dim() < 2]
optimizer = torch.optim.AdamW(
    [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
    fused=gpu.type == "cuda",
)
half = torch.autocast("cuda", torch.bfloat16) if gpu.type == "cuda" else nullcontext()
x, y = batch()
for step in range(100):
    for group in optimizer.param_groups:
        group["lr"] = 3e-4 * (1 + math.cos(step / 100 * math.pi)) / 2
    for _ in range(args.accumulate):
        with half:
            loss = model(x, y) / args.accumulate
        x, y = batch()
        loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item() * args.accumulate:.3f}")
        torch.save(model.state_dict(), "ckpt.pt")
