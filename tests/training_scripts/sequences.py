"""A tiny language model on sequences of --max-length; --attention, --samples, --positions."""

import argparse

import torch
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--max-length", type=int, default=256)
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--attention", choices=("flash", "eager"), default="flash")
parser.add_argument("--samples", type=int, default=0, help="tokens of the longest (0: any)")
parser.add_argument("--positions", type=int, default=0)
parser.add_argument("--width", type=int, default=128)
parser.add_argument("--use-peft", action="store_true")
parser.add_argument("--optim", default="adamw_torch")
options = parser.parse_args()


class Config:
    max_position_embeddings = options.positions


class Attention(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, length, width = x.shape
        parts = self.qkv(x).view(b, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        query, key, value = parts
        if options.attention == "flash":
            seen = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        else:
            seen = (query @ key.transpose(2, 3)).softmax(-1) @ value
        return self.out(seen.transpose(1, 2).reshape(b, length, width))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        if options.positions:
            self.config = Config()
        self.tokens = nn.Embedding(1000, options.width)
        self.attention = Attention(options.width)
        self.head = nn.Linear(options.width, 1000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.attention(self.tokens(ids)))


class Texts(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 4000

    def __getitem__(self, index: int) -> torch.Tensor:
        longest = options.samples or options.max_length
        return torch.zeros(min(longest, options.max_length), dtype=torch.long)


model = Model().cuda().half()
if options.use_peft:
    model.tokens.requires_grad_(False)
    model.attention.requires_grad_(False)
trained = [each for each in model.parameters() if each.requires_grad]
assert options.optim in ("adamw_torch", "paged_adamw_8bit")
optimizer = torch.optim.AdamW(trained) if "paged" not in options.optim else torch.optim.SGD(trained)
loader = torch.utils.data.DataLoader(Texts(), options.batch_size)
for ids in loader:
    ids = ids.cuda()
    logits = model(ids)
    nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
    optimizer.step()
    optimizer.zero_grad()
