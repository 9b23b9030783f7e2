"""Train an ACT policy on the videos of make_dataset.py: an ordinary PyTorch script.

For example:

    python examples/act/train.py --dataset=data/act --batch_size=8 --num_workers=4 --amp=true
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
from dataset import DatasetError, EpisodeDataset, MissingDatasetError
from model import ACTConfig, ACTPolicy
from torch import Tensor
from torch.utils.data import DataLoader

AMP_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
GRAD_CLIP_NORM = 10.0  # LeRobot's


class UsageError(Exception):
    """Options that cannot work; the message is one line."""


def boolean(text: str) -> bool:
    """An argparse type for `--name=true`."""
    value = text.strip().lower()
    if value in {"true", "1", "yes"}:
        return True
    if value in {"false", "0", "no"}:
        return False
    raise argparse.ArgumentTypeError(f"{text!r} is not true or false")


def at_least(low: float, kind: Callable[[str], float]) -> Callable[[str], float]:
    """An argparse type: an int or a float that is not below `low`."""

    def parse(text: str) -> float:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value < float("inf"):
            raise argparse.ArgumentTypeError(f"{text} is not {low} or more")
        return value

    return parse


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The options, checked; leaves with status 2 and one line if they are wrong."""
    parser = OneLineParser(
        description="Train an ACT policy.",
        allow_abbrev=False,
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    count, positive = at_least(0, int), at_least(1, int)
    rate = at_least(0.0, float)

    data = parser.add_argument_group("data")
    data.add_argument("--dataset", type=Path, required=True, help="directory of make_dataset.py")
    data.add_argument("--batch_size", type=positive, default=8, help="samples a step")
    data.add_argument("--num_workers", type=count, default=0, help="loader processes")
    data.add_argument("--prefetch_factor", type=positive, default=2, help="batches a worker")
    data.add_argument("--persistent_workers", type=boolean, default=False, help="keep workers")
    data.add_argument("--pin_memory", type=boolean, default=True, help="only used with a GPU")
    data.add_argument("--image_scale", type=at_least(0.05, float), default=1.0, help="of each side")

    run = parser.add_argument_group("training")
    run.add_argument("--epochs", type=positive, default=1, help="passes over the data")
    run.add_argument("--steps", type=positive, help="optimizer steps; overrides --epochs")
    run.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw", help=" ")
    run.add_argument("--lr", type=rate, default=1e-4, help="learning rate")
    run.add_argument("--lr_backbone", type=rate, default=1e-5, help="learning rate of the ResNet")
    run.add_argument("--weight_decay", type=rate, default=1e-4, help=" ")
    run.add_argument("--freeze_backbone", type=boolean, default=False, help="do not train it")
    run.add_argument("--amp", type=boolean, default=False, help="train under autocast")
    run.add_argument("--amp_dtype", choices=tuple(AMP_DTYPES), default="bf16", help=" ")
    run.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:1, ...")
    run.add_argument("--seed", type=count, default=0, help="random seed")
    run.add_argument("--log_every", type=positive, default=10, help="steps")
    run.add_argument("--output_dir", type=Path, help="save a checkpoint here at the end")

    model = parser.add_argument_group("model")
    model.add_argument("--chunk_size", type=positive, default=30, help="actions a prediction")
    model.add_argument("--dim", type=positive, default=512, help="width of the Transformers")
    model.add_argument("--heads", type=positive, default=8, help="attention heads")
    model.add_argument("--ffn", type=positive, default=3200, help="feed-forward width")
    model.add_argument("--layers", type=positive, default=4, help="encoder layers")
    model.add_argument("--decoder_layers", type=positive, default=1, help=" ")
    model.add_argument("--vae_layers", type=positive, default=4, help=" ")
    model.add_argument("--dropout", type=rate, default=0.1, help=" ")
    model.add_argument("--kl_weight", type=rate, default=10.0, help="of the loss")
    options = parser.parse_args(argv)

    # A quarter of the width each for sine and cosine of an image token's row and column.
    if options.dim % options.heads or options.dim % 4:
        parser.error(f"--dim {options.dim} must be a multiple of --heads {options.heads} and of 4")
    if options.dropout >= 1:
        parser.error(f"--dropout {options.dropout} must be below 1")
    return options


def pick_device(name: str) -> torch.device:
    """The device asked for; `auto` is the GPU if there is one."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise UsageError(f"--device {name}: no such kind of device") from None
    if device.type not in {"cpu", "cuda"}:
        raise UsageError(f"--device {name}: this script knows cpu and cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UsageError(f"--device {name}: this machine has no such GPU")
    return device


def open_dataset(options: argparse.Namespace) -> EpisodeDataset:
    """The data set, or an error that says how to make one."""
    try:
        dataset = EpisodeDataset(options.dataset, options.chunk_size, options.image_scale)
    except MissingDatasetError as error:
        maker = Path(__file__).with_name("make_dataset.py")
        raise UsageError(f"{error}; make one: python {maker} --out {options.dataset}") from None
    if len(dataset) < options.batch_size:
        raise UsageError(
            f"--batch_size {options.batch_size} is more than the {len(dataset)} samples of the data"
        )
    return dataset


def make_loader(
    dataset: EpisodeDataset, options: argparse.Namespace, device: torch.device
) -> DataLoader[dict[str, Tensor]]:
    """Shuffled batches of samples, stacked: (B, 3, H, W) images and so on."""
    # DataLoader refuses these two without workers.
    worker_options: dict[str, Any] = {}
    if options.num_workers > 0:
        worker_options["prefetch_factor"] = options.prefetch_factor
        worker_options["persistent_workers"] = options.persistent_workers
    return DataLoader(
        dataset,
        batch_size=options.batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=options.num_workers,
        pin_memory=options.pin_memory and device.type == "cuda",
        generator=torch.Generator().manual_seed(options.seed),
        **worker_options,
    )


def make_model(options: argparse.Namespace, dataset: EpisodeDataset) -> ACTPolicy:
    """The policy, on the CPU and in float32."""
    policy = ACTPolicy(
        ACTConfig(
            cameras=tuple(dataset.sizes),
            state_dim=dataset.meta["state_dim"],
            action_dim=dataset.meta["action_dim"],
            chunk_size=options.chunk_size,
            dim=options.dim,
            heads=options.heads,
            ffn=options.ffn,
            layers=options.layers,
            decoder_layers=options.decoder_layers,
            vae_layers=options.vae_layers,
            dropout=options.dropout,
            kl_weight=options.kl_weight,
        )
    )
    if options.freeze_backbone:
        policy.backbone.requires_grad_(False)
    return policy


def make_optimizer(policy: ACTPolicy, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Two parameter groups: the backbone has a learning rate of its own."""
    backbone = [p for p in policy.backbone.parameters() if p.requires_grad]
    in_backbone = {id(p) for p in policy.backbone.parameters()}
    groups: list[dict[str, Any]] = [
        {"params": [p for p in policy.parameters() if id(p) not in in_backbone]}
    ]
    if backbone:
        groups.append({"params": backbone, "lr": options.lr_backbone})
    if options.optimizer == "sgd":
        return torch.optim.SGD(
            groups, lr=options.lr, momentum=0.9, weight_decay=options.weight_decay
        )
    return torch.optim.AdamW(groups, lr=options.lr, weight_decay=options.weight_decay)


def batches(
    loader: DataLoader[dict[str, Tensor]], steps: int
) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """Step number, from 1, and batch, over as many epochs as `steps` needs."""
    step = 0
    while step < steps:
        for batch in loader:
            step += 1
            yield step, batch
            if step == steps:
                return


def train(options: argparse.Namespace) -> None:
    """Train as the options say and print a line every so often."""
    device = pick_device(options.device)
    torch.manual_seed(options.seed)
    dataset = open_dataset(options)
    loader = make_loader(dataset, options, device)
    policy = make_model(options, dataset).to(device)
    optimizer = make_optimizer(policy, options)
    amp_dtype = AMP_DTYPES[options.amp_dtype]
    # fp16 gradients underflow without loss scaling; bf16 has float32's range.
    scaler = torch.amp.GradScaler(device.type, enabled=options.amp and options.amp_dtype == "fp16")

    steps = options.steps or options.epochs * len(loader)
    parameters = sum(p.numel() for p in policy.parameters())
    precision = options.amp_dtype if options.amp else "fp32"
    print(
        f"{parameters:,} parameters, {len(dataset)} samples, {steps} steps of"
        f" {options.batch_size} on {device} in {precision}",
        flush=True,
    )

    policy.train()
    start = time.perf_counter()
    for step, cpu_batch in batches(loader, steps):
        batch = {name: value.to(device, non_blocking=True) for name, value in cpu_batch.items()}
        with torch.autocast(device.type, dtype=amp_dtype, enabled=options.amp):
            loss, parts = policy(batch)
        scaler.scale(loss).backward()
        # Clip the true gradients, not the scaled ones.
        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(policy.parameters(), GRAD_CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()

        if step == 1 or step % options.log_every == 0 or step == steps:
            # .item() waits for the GPU, so it is called only when a line is due.
            values = {"loss": loss, **parts, "grad_norm": grad_norm}
            text = " ".join(f"{name} {value.item():.4f}" for name, value in values.items())
            now = time.perf_counter()
            print(f"step {step} {text} elapsed_s {now - start:.2f}", flush=True)

    if device.type == "cuda":
        print(
            f"peak memory: allocated {torch.cuda.max_memory_allocated(device) / 2**20:.0f} MiB,"
            f" reserved {torch.cuda.max_memory_reserved(device) / 2**20:.0f} MiB"
        )
    if options.output_dir is not None:
        save_checkpoint(policy, options.output_dir)


def save_checkpoint(policy: ACTPolicy, folder: Path) -> None:
    """Write folder/checkpoint.pt: the model's sizes and weights."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "checkpoint.pt"
    partial = folder / "checkpoint.pt.part"
    torch.save({"config": asdict(policy.cfg), "model": policy.state_dict()}, partial)
    os.replace(partial, path)
    print(f"saved {path}")


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 2 for options or data that cannot be used."""
    options = parse_options(argv)
    try:
        train(options)
    except (UsageError, DatasetError) as error:
        print(f"train.py: error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
