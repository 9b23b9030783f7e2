"""A little encoder, its batches padded to their longest text, as a tokenizer's collator does."""

import argparse

import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8)
parser.add_argument("--texts", type=int, default=2000)
parser.add_argument("--amp", choices=["true", "false"], default="false")
options = parser.parse_args()

lengths = torch.randint(8, 257, (options.texts,), generator=torch.Generator().manual_seed(0))
texts = [{"input_ids": torch.zeros(int(n), dtype=torch.long)} for n in lengths]


def collate(samples):
    tokens = [sample["input_ids"] for sample in samples]
    padded = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    return {"input_ids": padded, "labels": torch.zeros(len(samples), dtype=torch.long)}


loader = DataLoader(texts, options.batch_size, shuffle=True, collate_fn=collate)
layer = torch.nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True)
embed, encoder = torch.nn.Embedding(1000, 256).cuda(), torch.nn.TransformerEncoder(layer, 4).cuda()
head = torch.nn.Linear(256, 2).cuda()
model = torch.nn.Sequential(embed, encoder)
optimizer = torch.optim.AdamW([*model.parameters(), *head.parameters()])
for _ in range(100):
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=options.amp == "true"):
            hidden = model(batch["input_ids"].cuda())
            logits = head(hidden[:, 0])
        torch.nn.functional.cross_entropy(logits, batch["labels"].cuda()).backward()
        optimizer.step()
        optimizer.zero_grad()
