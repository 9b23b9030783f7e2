"""A small training script, as a user would write it; the options switch its habits."""

import argparse
import contextlib
import os
import sys

import torch
from torch.utils.data import DataLoader
from widths import hidden_width


class Samples(torch.utils.data.Dataset):
    """Defined in the script, so that workers must find it in ``__main__``."""

    def __init__(self, count, width):
        self.count, self.width = count, width

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return torch.full((64, self.width), float(index))


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch_size", type=int, default=int(os.environ.get("BATCH_SIZE", 8)))
    parser.add_argument("--amp", choices=["true", "false", "bf16", "no"], default="false")
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--start_method", choices=["fork", "spawn"], default="fork")
    parser.add_argument("--scaler", action="store_true")
    parser.add_argument("--guard", choices=["none", "exception", "bare"], default="none")
    parser.add_argument("--json", action="store_true", help="prints JSON of its own")
    parser.add_argument("--drop_last", action="store_true")
    parser.add_argument("words", nargs="*", help="echoed")
    return parser.parse_args()


def main():
    options = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    width = hidden_width(options.width)
    blocks = [
        layer
        for _ in range(options.layers)
        for layer in (torch.nn.Linear(width, width), torch.nn.GELU())
    ]
    model = torch.nn.Sequential(*blocks).to(device)
    optimizer = torch.optim.AdamW(model.parameters())
    scaler = torch.amp.GradScaler("cuda", enabled=options.scaler)
    loader = DataLoader(
        Samples(options.samples, width),
        batch_size=options.batch_size,
        num_workers=options.workers,
        multiprocessing_context=options.start_method if options.workers else None,
        drop_last=options.drop_last,
    )
    amp = options.amp in ("true", "bf16")
    dtype = torch.float16 if options.scaler else torch.bfloat16
    print(options.words)
    if options.json:
        print('{"epoch": 0}')

    def batch_step(number, batch):
        with torch.autocast(device, dtype=dtype, enabled=amp):
            loss = model(batch.to(device)).square().mean() / options.accumulate
        scaler.scale(loss).backward()
        if (number + 1) % options.accumulate == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            print("loss", loss.item(), flush=True)

    for epoch in range(100):
        for number, batch in enumerate(loader):
            if options.guard == "bare":
                try:
                    batch_step(number, batch)
                except:  # noqa: E722
                    print("skipped a batch", file=sys.stderr)
            elif options.guard == "exception":
                with contextlib.suppress(Exception):
                    batch_step(number, batch)
            else:
                batch_step(number, batch)
        print("epoch", epoch)


if __name__ == "__main__":
    main()
