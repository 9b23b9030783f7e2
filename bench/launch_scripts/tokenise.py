"""Train a bag-of-words classifier on text that is tokenised in plain Python."""

import argparse
import itertools
import random

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

LETTERS = "etaoinshrdlu"


class Reviews(Dataset):
    """Made-up texts; each is cut into words, stemmed, augmented and hashed when it is asked for."""

    def __init__(self, count, words, length, buckets):
        rng = random.Random(0)
        vocabulary = ["".join(rng.choices(LETTERS, k=rng.randint(2, 11))) for _ in range(5000)]
        self.texts = [" ".join(rng.choices(vocabulary, k=words)) for _ in range(count)]
        self.length, self.buckets = length, buckets

    def __len__(self):
        return len(self.texts)

    def stem(self, word):
        for ending in ("ation", "ness", "ing", "ers", "ed", "s"):
            if word.endswith(ending) and len(word) > len(ending) + 2:
                return word[: -len(ending)]
        return word

    def bucket(self, piece):
        code = 2166136261
        for letter in piece:
            code = ((code ^ ord(letter)) * 16777619) & 0xFFFFFFFF
        return code % self.buckets

    def __getitem__(self, index):
        words = [self.stem(word) for word in self.texts[index].split()]
        kept = [word for word in words if random.random() > 0.1]
        pieces = kept + [f"{first}_{second}" for first, second in itertools.pairwise(kept)]
        ids = [self.bucket(piece) for piece in pieces][: self.length]
        ids += [0] * (self.length - len(ids))
        return torch.tensor(ids), torch.tensor(index % 2)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=16, dest="batch")
    parser.add_argument("-j", "--workers", type=int, default=4, metavar="N")
    parser.add_argument("--words", type=int, default=220)
    parser.add_argument("--texts", type=int, default=4000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--limit", type=int, help="steps an epoch")
    parser.add_argument("--cpu", action="store_true")
    args = parser.parse_args()
    device = torch.device("cpu" if args.cpu or not torch.cuda.is_available() else "cuda")

    train = DataLoader(
        Reviews(args.texts, args.words, 2 * args.words, 1 << 15),
        batch_size=args.batch,
        shuffle=True,
        num_workers=args.workers,
    )
    bag = nn.EmbeddingBag(1 << 15, 64, mode="mean")
    model = nn.Sequential(bag, nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2)).to(device)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    for epoch in range(args.epochs):
        for step, (ids, label) in enumerate(train, 1):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(ids.to(device)), label.to(device))
            loss.backward()
            optimizer.step()
            if step == args.limit:
                break
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
