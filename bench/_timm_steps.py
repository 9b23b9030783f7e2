"""Steps of timm's benchmark script on the simulated GPU: the kernels that each model launches.

The script is timm's ``benchmark.py`` (https://github.com/huggingface/pytorch-image-models):
``torch.backends.cudnn.benchmark``, float16 autocast; to train, cross entropy within autocast and
SGD with Nesterov momentum; to infer, ``torch.no_grad``. Random weights are not drawn.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import psutil

Mode = Literal["train", "infer"]
#: Changes whenever what is recorded of a step does, so that cached steps are made again.
VERSION = 7
#: A model of the same name has as many parameters as the table's but for this share, or is another
#: by now (ecaresnext50t_32x4d had two blocks a stage).
_SAME = 0.01
#: Half of the last digit of the tables' parameters.
_ROUNDED = 5e3
#: Share of the free memory that a model's weights may take: two are made at a time.
_ROOM = 0.4
_INITS = (
    *("uniform_", "normal_", "trunc_normal_", "kaiming_uniform_", "kaiming_normal_"),
    *("xavier_uniform_", "xavier_normal_", "orthogonal_"),
)


@dataclass(frozen=True)
class PublishedStep:
    """One row of a table: a model's step, and what it took.

    ``options`` are what the script was run with: "nhwc" (channels_last), "unfused" (attention by
    products and a softmax, as before PyTorch 2), "half_math" (attention without a fused kernel in
    halves, as before PyTorch 2.5), "fast_norm" and "reparam" (its own options).
    ``parameters`` are its weights (0: not told).
    """

    model: str
    mode: Mode
    size: int
    batch: int
    gpu: str
    measured_s: float
    options: tuple[str, ...] = ()
    parameters: float = 0.0

    def file(self, folder: Path, timm_version: str) -> Path:
        """Where its kernels are kept."""
        words = (self.model, self.mode, self.size, self.batch, self.gpu, *self.options)
        text = "|".join(map(str, (VERSION, timm_version, *words)))
        return folder / f"{self.model}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.npz"


def steps(job: PublishedStep, folder: Path, timm_path: str) -> dict[str, Any]:
    """The kernels of the job's step: ``table``, ``op``, ``op_phase`` of ``speed.work.Work``.

    Or "error": why it could not be simulated. Made once, and then read from ``folder``.
    """
    timm = _prepared(timm_path)
    file = job.file(folder, timm.__version__)
    if file.exists():
        with np.load(file) as kept:
            return {name: kept[name] for name in kept.files}
    room = psutil.virtual_memory().available * _ROOM
    if job.parameters * 4 > room:  # timm makes them on the CPU
        return {"error": f"its weights take {job.parameters * 4 / 1e9:.0f} GB of this machine's"}
    try:
        found = _simulated(job, timm)
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error)[:200]}"}
    folder.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{os.getpid()}.npz")
    np.savez_compressed(scratch, **found)
    scratch.replace(file)
    return found


def _prepared(timm_path: str) -> Any:
    """timm, whose models are made without drawing weights."""
    warnings.filterwarnings("ignore")
    if timm_path and timm_path not in sys.path:
        sys.path.insert(0, timm_path)
    import torch

    from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators

    torch.set_num_threads(1)
    define_torchvision_operators()
    for name in _INITS:
        setattr(torch.nn.init, name, _as_it_is)
    import timm
    from timm.layers import weight_init

    for name in dir(weight_init):
        if name.endswith("_") and not name.startswith("_"):
            setattr(weight_init, name, _as_it_is)
    return timm


def _as_it_is(tensor: Any, *_: Any, **__: Any) -> Any:
    return tensor


def _simulated(job: PublishedStep, timm: Any) -> dict[str, Any]:
    import torch

    import trainfit
    from trainfit.speed.work import Work

    timm.layers.set_fused_attn("unfused" not in job.options)
    timm.layers.set_fast_norm("fast_norm" in job.options)
    torch.backends.cuda.allow_fp16_bf16_reduction_math_sdp("half_math" in job.options)
    with trainfit.simulate(job.gpu, limited=False) as simulation:
        torch.backends.cudnn.benchmark = True
        model, images = _made(job, timm, torch)
        if job.mode == "infer":
            simulation.end_step()  # making the model is a step of its own
        act = (
            _trains(model, images, torch) if job.mode == "train" else _infers(model, images, torch)
        )
        act()
        if job.mode == "train":
            act()  # the first step makes gradients and the optimizer's state
        else:
            simulation.end_step()
    recording = simulation.recording
    work = Work.of_step(recording, recording.steps - 1)
    return {"table": work.table, "op": work.op, "op_phase": work.op_phase}


def _made(job: PublishedStep, timm: Any, torch: Any) -> tuple[Any, Any]:
    model = timm.create_model(job.model, pretrained=False)
    if hasattr(model, "set_input_size") and model.default_cfg["input_size"][-1] != job.size:
        model.set_input_size(img_size=(job.size, job.size))
    if "reparam" in job.options:
        model = timm.utils.reparameterize_model(model)
    layout = torch.channels_last if "nhwc" in job.options else torch.contiguous_format
    count = sum(parameter.numel() for parameter in model.parameters())
    if job.parameters and abs(count - job.parameters) > _SAME * job.parameters + _ROUNDED:
        raise ValueError(
            f"another model: {count / 1e6:.2f} million parameters here, "
            f"{job.parameters / 1e6:.2f} in the table"
        )
    model = model.to(device="cuda", memory_format=layout)
    images = torch.randn((job.batch, 3, job.size, job.size), device="cuda")
    return model, images.contiguous(memory_format=layout)


def _trains(model: Any, images: Any, torch: Any) -> Callable[[], None]:
    model.train()
    # PyTorch 1.12's SGD goes over the parameters one by one, and zeroes gradients.
    options = {"lr": 1e-4, "momentum": 0.9, "nesterov": True, "foreach": False}
    optimizer = torch.optim.SGD(model.parameters(), **options)
    loss = torch.nn.CrossEntropyLoss().cuda()

    def step() -> None:
        optimizer.zero_grad(set_to_none=False)
        with torch.autocast("cuda", dtype=torch.float16):
            output = model(images)
            output = output[0] if isinstance(output, tuple) else output
            target = torch.empty(len(output), device="cuda", dtype=torch.long).random_(1000)
            loss(output, target).backward()
        optimizer.step()

    return step


def _infers(model: Any, images: Any, torch: Any) -> Callable[[], None]:
    model.eval()

    def step() -> None:
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            model(images)

    return step
