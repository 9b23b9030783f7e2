"""A training script with mixed precision, and what gets along with it badly."""

import argparse

import torch
from torch.utils.data import DataLoader

parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=16)
parser.add_argument("--amp", choices=["true", "false"], default="false")
parser.add_argument("--dtype", choices=["float16", "bfloat16"], default="float16")
parser.add_argument("--scaler", action="store_true")
parser.add_argument("--width", type=int, default=2048)
parser.add_argument("--what", default="plain")
options = parser.parse_args()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class AmpDouble(Double):
    forward = staticmethod(torch.amp.custom_fwd(Double.forward, device_type="cuda"))
    backward = staticmethod(torch.amp.custom_bwd(Double.backward, device_type="cuda"))


@torch.library.custom_op("trainfit_tests::triple", mutates_args=())
def triple(x: torch.Tensor) -> torch.Tensor:
    return x * 3


triple.register_fake(torch.empty_like)
triple.register_autograd(lambda ctx, gradient: gradient * 3)


def layers(width):
    for _ in range(4):
        yield torch.nn.Linear(width, width)
        if options.what == "norms":
            yield torch.nn.LayerNorm(width)
            yield torch.nn.Softmax(-1)
        else:
            yield torch.nn.GELU()


def loss_of(x):
    if options.what == "bce":
        return torch.nn.functional.binary_cross_entropy(x.sigmoid(), torch.zeros_like(x))
    if options.what == "mask":
        scores = x @ x.transpose(1, 2)
        mask = torch.ones(scores.shape, dtype=torch.bool, device="cuda")
        return scores.masked_fill(mask, -1e9).softmax(-1).mean()
    if options.what == "function":
        return Double.apply(AmpDouble.apply(x)).mean()
    if options.what == "operator":
        return triple(x).mean()
    return x.square().mean()


model = torch.nn.Sequential(*layers(options.width)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
amp, dtype = options.amp == "true", getattr(torch, options.dtype)
scaler = torch.amp.GradScaler("cuda", enabled=amp and options.scaler)
data = torch.zeros(1, 1, options.width).expand(2000, 64, options.width)
for batch in DataLoader(data, options.batch_size):
    with torch.autocast("cuda", dtype=dtype, enabled=amp):
        x = model(batch.cuda())
        loss = None if options.what == "outside" else loss_of(x)
    if loss is None:
        loss = x.square().sum()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
