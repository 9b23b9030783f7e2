"""A training with the symptoms that its options ask for.

What a GPU would compute is a pause, so that the machine's cores are free for the cause.
"""

import argparse
import io
import math
import os
import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

SIZE = 64


def busy(seconds):
    """CPU time of this thread."""
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        math.sqrt(2.0)


class Net(torch.nn.Module):
    """A linear layer whose forward pass takes a while, as a GPU's would."""

    def __init__(self, seconds):
        super().__init__()
        self.layer, self.seconds = torch.nn.Linear(SIZE, 1), seconds

    def forward(self, samples):
        time.sleep(self.seconds)
        return self.layer(samples)


class Samples(Dataset):
    def __init__(self, options):
        self.options = options

    def __len__(self):
        return self.options.batches

    def __getitem__(self, index):
        given, info = self.options, get_worker_info()
        time.sleep(given.sleep)
        if given.cpu:
            busy(given.cpu)
        if given.threads:
            product = torch.randn(400, 400)
            until = time.monotonic() + 0.05
            while time.monotonic() < until:
                product = product @ product / 400
        if given.slow_worker and info is not None and info.id == 1:
            time.sleep(given.slow_worker)
        if given.every_eighth and index % 8 == 7:
            time.sleep(given.every_eighth)
        if given.image:
            return transformed(given.image)
        if given.tensors:
            return [torch.ones(1) for _ in range(given.tensors)]
        return torch.ones(SIZE)


def transformed(kind):
    """An image that is decoded, or augmented, at some length."""
    from PIL import Image, ImageFilter

    if kind == "decode":
        image = Image.open(io.BytesIO(jpeg())).convert("RGB")
    else:
        image = Image.new("RGB", (800, 600)).filter(ImageFilter.GaussianBlur(20))
    return torch.ones(SIZE) * image.getpixel((0, 0))[0] / 255


_JPEG = []


def jpeg():
    if not _JPEG:
        from PIL import Image

        file = io.BytesIO()
        Image.effect_noise((1600, 1200), 60).convert("RGB").save(file, "JPEG", quality=95)
        _JPEG.append(file.getvalue())
    return _JPEG[0]


class Slow:
    """Something that a slow disk takes so long to write."""

    def __init__(self, seconds):
        self.seconds = seconds

    def __getstate__(self):
        time.sleep(self.seconds)
        return {"seconds": self.seconds}


def parse():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--batches", type=int, default=10**6, help="of an epoch")
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--step", type=float, default=0.02, help="seconds of a forward pass")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds of a batch, waiting")
    parser.add_argument("--cpu", type=float, default=0.0, help="CPU seconds of a batch")
    parser.add_argument("--threads", type=int, default=0, help="of a worker")
    parser.add_argument("--worker-start", type=float, default=0.0)
    parser.add_argument("--slow-worker", type=float, default=0.0)
    parser.add_argument("--every-eighth", type=float, default=0.0)
    parser.add_argument("--image", choices=["decode", "transform"])
    parser.add_argument("--tensors", type=int, default=0, help="of a sample")
    parser.add_argument("--checkpoint", type=float, default=0.0)
    parser.add_argument("--evaluate", action="store_true")
    parser.add_argument("--nan-from", type=int, default=10**9)
    parser.add_argument("--overflow", action="store_true", help="of float16 gradients")
    parser.add_argument("--leak", type=int, default=0, help="bytes that each step keeps")
    parser.add_argument("--other", type=float, default=0.0, help="CPU seconds between steps")
    parser.add_argument("--slow-rank", type=float, default=0.0)
    return parser.parse_args()


def loader_of(options):
    def start(_):
        time.sleep(options.worker_start)
        if options.threads:
            torch.set_num_threads(options.threads)

    keep = (lambda batch: batch[0]) if options.tensors else None
    return DataLoader(
        Samples(options),
        batch_size=1,
        num_workers=options.workers,
        persistent_workers=options.persistent,
        worker_init_fn=start,
        collate_fn=keep,
    )


def endless(loader):
    while True:
        yield from loader


def train(options, model):
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    scaler = torch.amp.GradScaler("cpu", enabled=options.overflow)
    kept = []
    for number, samples in enumerate(endless(loader_of(options))):
        if number == options.steps:
            break
        samples = torch.stack(samples * SIZE)[:SIZE].T if options.tensors else samples
        loss = model(samples.float()).square().mean()
        if number >= options.nan_from:
            loss = loss * math.nan
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        if options.overflow and number % 3 == 0:
            model.layer.weight.grad.fill_(math.inf)
        scaler.step(optimizer)
        scaler.update()
        if options.leak:
            kept.append(bytearray(os.urandom(1) * options.leak))
        if options.other:
            busy(options.other)
        if options.slow_rank and os.environ.get("RANK") == "1":
            time.sleep(options.slow_rank)
        if options.checkpoint and number % 5 == 4:
            torch.save(Slow(options.checkpoint), io.BytesIO())
        if options.evaluate and number % 10 == 9:
            model.eval()
            with torch.no_grad():
                for _ in range(20):
                    model(torch.ones(1, SIZE))
            model.train()


def main():
    options = parse()
    model = Net(options.step)
    if "RANK" in os.environ:
        torch.distributed.init_process_group("gloo")
        model = torch.nn.parallel.DistributedDataParallel(model)
    train(options, model)
    if "RANK" in os.environ:
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
