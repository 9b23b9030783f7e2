"""A word model without an optimizer of PyTorch's and without a DataLoader: parameters are updated
by hand, batches are columns of one tensor, time comes before the batch."""

import argparse

import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=20)
parser.add_argument("--bptt", type=int, default=35)
options = parser.parse_args()


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(500, 64)
        self.recurrent = torch.nn.LSTM(64, 64)
        self.decoder = torch.nn.Linear(64, 500)

    def forward(self, words):
        return self.decoder(self.recurrent(self.embedding(words))[0])


model = Words().cuda()
text = torch.randint(500, (options.bptt * 100, options.batch_size), device="cuda")
while True:
    for start in range(0, len(text) - options.bptt - 1, options.bptt):
        words, following = text[start:][: options.bptt], text[start + 1 :][: options.bptt]
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(words).flatten(0, 1), following.flatten())
        loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
