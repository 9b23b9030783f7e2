"""A word-level LSTM language model: text in columns, truncated backpropagation, SGD by hand's
clipping; no DataLoader."""

import torch
from common import device, options
from torch import nn

args = options(20, bptt=35)
gpu = device()
WORDS, WIDTH = 2000, 200


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.drop, self.embedding = nn.Dropout(0.2), nn.Embedding(WORDS, WIDTH)
        self.lstm, self.out = nn.LSTM(WIDTH, WIDTH, 2, dropout=0.2), nn.Linear(WIDTH, WORDS)
        self.out.weight = self.embedding.weight

    def forward(self, words, state):
        result, state = self.lstm(self.drop(self.embedding(words)), state)
        return self.out(self.drop(result)).view(-1, WORDS), state


model = Words().to(gpu)
text = torch.randint(WORDS, (100_000,))
columns = text[: len(text) // args.batch_size * args.batch_size].view(args.batch_size, -1)
columns = columns.t().contiguous().to(gpu)
optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
state = tuple(torch.zeros(2, args.batch_size, WIDTH, device=gpu) for _ in range(2))
for start in range(0, len(columns) - 1 - args.bptt, args.bptt):
    state = tuple(each.detach() for each in state)
    output, state = model(columns[start : start + args.bptt], state)
    wanted = columns[start + 1 : start + 1 + args.bptt].view(-1)
    optimizer.zero_grad()
    nn.functional.cross_entropy(output, wanted).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
