"""A training loop for scripts that differ in how their command line is read."""

import torch
from torch.utils.data import DataLoader


def train(batch_size, *, amp=None, workers=0, pin_memory=False, accumulate=1, eval_batch_size=4):
    """Two steps and more; ``amp`` is autocast's dtype, None for none."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    layers = [torch.nn.Linear(256, 256) for _ in range(4)]
    model = torch.nn.Sequential(*layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    samples = torch.randn(4096, 16, 256)
    with torch.no_grad():
        model(next(iter(DataLoader(samples, eval_batch_size))).to(device))
    loader = DataLoader(samples, batch_size, num_workers=workers, pin_memory=pin_memory)
    for _ in range(4):
        for number, batch in enumerate(loader, start=1):
            with torch.autocast(device, dtype=amp or torch.float16, enabled=amp is not None):
                loss = model(batch.to(device)).square().mean()
            (loss / accumulate if accumulate > 1 else loss).backward()
            if number % accumulate == 0:
                optimizer.step()
                optimizer.zero_grad()
