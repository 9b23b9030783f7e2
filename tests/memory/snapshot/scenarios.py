"""Training code whose snapshots have one cause each; run on the simulated device by the tests."""

from __future__ import annotations

import gc
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

KIB = 1 << 10
MIB = 1 << 20


def model(width: int = 1024, layers: int = 4) -> nn.Sequential:
    """Layers of ``width`` × ``width`` numbers."""
    parts: list[nn.Module] = []
    for _ in range(layers):
        parts += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*parts)


def train(net: nn.Module, batch: int = 256, width: int = 1024, steps: int = 3) -> None:
    """Steps that keep nothing."""
    optimizer = torch.optim.Adam(net.parameters())
    for _ in range(steps):
        x = torch.randn(batch, width).to("cuda")
        net(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def plain() -> None:
    """A training without a fault."""
    train(model().to("cuda"))


def predictions_kept() -> None:
    """An evaluation that appends its results to a list."""
    net = model(layers=2).to("cuda")
    kept = []
    with torch.no_grad():
        for _ in range(24):
            x = torch.randn(512, 1024).to("cuda")
            kept.append(net(x))
    del x


def many_layers() -> None:
    """One forward pass of 24 alike layers: their activations are no list that grows."""
    net = model(layers=24).to("cuda")
    x = torch.randn(512, 1024).to("cuda")
    net(x).mean().backward()


def failed_try_alive() -> None:
    """A second try within the except clause of the first."""
    net = model(layers=8).to("cuda")
    big = model(width=2048, layers=1).to("cuda")

    def one(batch: int) -> None:
        y = net(torch.randn(batch, 1024).to("cuda"))
        big(torch.cat([y, y], dim=1).repeat(64, 1))

    try:
        one(4096)
    except torch.cuda.OutOfMemoryError:
        one(4096)


def checkpoint_kept(path: Path, steps: int = 2) -> None:
    """A checkpoint that stays on the GPU beside the model."""
    net = model(layers=6).to("cuda")
    state = torch.load(path, map_location="cuda")
    net.load_state_dict(state)
    train(net, batch=32, steps=steps)
    del state
    gc.collect()


def large_vocabulary() -> None:
    """Logits in bfloat16, their float32 copy, and the loss's own."""
    head = nn.Linear(64, 32_000, dtype=torch.bfloat16).to("cuda")
    x = torch.randn(2048, 64).to("cuda").bfloat16()
    logits = head(x)
    F.cross_entropy(logits.float(), torch.zeros(2048, dtype=torch.long, device="cuda")).backward()


def one_checkpoint() -> None:
    """checkpoint() around the whole model."""
    net = model(layers=16).to("cuda")
    x = torch.randn(2048, 1024).to("cuda").requires_grad_()
    checkpoint(net, x, use_reentrant=False).mean().backward()


def block_checkpoints() -> None:
    """checkpoint() around each layer."""
    net = model(layers=16).to("cuda")
    x = torch.randn(2048, 1024).to("cuda").requires_grad_()
    for layer in net:
        x = checkpoint(layer, x, use_reentrant=False)
    x.mean().backward()


def losses_kept() -> None:
    """A training that sums up its losses, and with them their graphs."""
    net = model(layers=2).to("cuda")
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-6)
    total = torch.zeros((), device="cuda")
    for _ in range(24):
        x = torch.randn(512, 1024).to("cuda")
        loss = (net(x) * 0.5).square().mean()
        total = total + loss
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()


def layers_of_a_function() -> None:
    """One forward pass of 24 layers that no module holds."""
    layers = [nn.Linear(1024, 1024).to("cuda") for _ in range(24)]
    x = torch.randn(512, 1024).to("cuda")
    for layer in layers:
        x = torch.relu(layer(x) * 0.5)
    x.mean().backward()


def fragmented() -> None:
    """Small tensors stay in segments of large ones that are freed; then one large request."""
    fill = [torch.empty(30 * MIB, dtype=torch.uint8, device="cuda") for _ in range(31)]
    fill.clear()
    small = []
    for _ in range(31):
        fill.append(torch.empty(28 * MIB, dtype=torch.uint8, device="cuda"))
        small.append(torch.empty(2 * MIB, dtype=torch.uint8, device="cuda"))
    fill.clear()
    torch.empty(500 * MIB, dtype=torch.uint8, device="cuda")
