"""Train a language model on tokens that are ready: the GPU has all the work."""

import argparse

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Tokens(Dataset):
    def __init__(self, tokens, context):
        self.tokens, self.context = tokens, context

    def __len__(self):
        return (len(self.tokens) - 1) // self.context

    def __getitem__(self, index):
        begin = index * self.context
        window = self.tokens[begin : begin + self.context + 1].astype(np.int64)
        return torch.from_numpy(window[:-1]), torch.from_numpy(window[1:])


class Decoder(nn.Module):
    def __init__(self, vocabulary, dim, heads, layers, context):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(torch.zeros(context, dim))
        layer = nn.TransformerEncoderLayer(
            dim, heads, 4 * dim, dropout=0.0, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(dim, vocabulary, bias=False)
        mask = nn.Transformer.generate_square_subsequent_mask(context)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, tokens):
        hidden = self.embed(tokens) + self.position
        return self.head(self.blocks(hidden, mask=self.mask, is_causal=True))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=4)
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--dim", type=int, default=768)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--iterations", type=int, default=2000)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"

    tokens = np.random.default_rng(0).integers(0, 8192, 1 << 20).astype(np.uint16)
    loader = DataLoader(
        Tokens(tokens, args.context),
        batch_size=args.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=1,
        pin_memory=True,
    )
    model = Decoder(8192, args.dim, 12, args.layers, args.context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    iteration = 0
    while iteration < args.iterations:
        for inputs, targets in loader:
            inputs = inputs.to(device, non_blocking=True)
            targets = targets.to(device, non_blocking=True)
            loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            iteration += 1
            if iteration >= args.iterations:
                break
    print(f"loss {loss.item():.3f}")


if __name__ == "__main__":
    main()
