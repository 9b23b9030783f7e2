"""What other tools say about a timm model's training memory; each by its own functions.

Every function takes a timm model's name and batch sizes, and gives MiB by batch size. They
train, where they train, as timm's script does: SGD with Nesterov momentum and weight decay,
label smoothing, float32. They run in a child process (`memory_peers.py`), and none needs the
weights' values: the model is made on the CPU and kept without data.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

MIB = 1 << 20

Figures = dict[int, float]


class NotInstalledError(Exception):
    """The tool's package is not there."""


@functools.lru_cache(maxsize=1)
def without_data(name: str) -> Any:
    """The model on the meta device. timm reads values while it builds one, so it is made first."""
    import timm

    return timm.create_model(name).to("meta")


def torchinfo_total(name: str, batches: Sequence[int]) -> Figures:
    """torchinfo's "Estimated Total Size": input, outputs of leaf layers twice, parameters."""
    import torchinfo

    figures = {}
    for batch in batches:
        model = copy.deepcopy(without_data(name))
        shape = (batch, *model.default_cfg["input_size"])
        found = torchinfo.summary(model, shape, device="meta", mode="train", verbose=0)
        total = found.total_input + found.total_output_bytes + found.total_param_bytes
        figures[batch] = total / MIB
    return figures


def accelerate_estimate(name: str, batches: Sequence[int]) -> Figures:
    """``accelerate estimate-memory``, "Training using Adam" in float32: no batch size in it."""
    import timm
    from accelerate import init_empty_weights
    from accelerate.commands.estimate import estimate_training_usage
    from accelerate.utils import calculate_maximum_sizes

    # As its create_empty_model does for timm, less the question to the hub.
    with init_empty_weights():
        model = timm.create_model(name, pretrained=False)
    total, _ = calculate_maximum_sizes(model)
    usage = max(estimate_training_usage(total, "float32").values())
    return dict.fromkeys(batches, usage / MIB)


def vram_check(name: str, batches: Sequence[int]) -> Figures:
    """vram-check's ``analyze``: activations are twice the parameters, times the batch size."""
    try:
        from vram_check import analyze
    except ImportError as error:
        raise NotInstalledError("pip install vram-check") from error
    model = without_data(name)
    return {
        batch: analyze(model, batch, "fp32", "sgd", training=True)["estimate"].total_bytes / MIB
        for batch in batches
    }


def fake_tensor(name: str, batches: Sequence[int]) -> Figures:
    """Naive FakeTensor: most bytes of storages alive at once in two steps, on the CPU."""
    return {batch: _live_peak(name, batch) for batch in batches}


def mem_tracker(name: str, batches: Sequence[int]) -> Figures:
    """PyTorch's MemTracker over FakeTensorMode: total at its peak, in a second step.

    A tracked step takes some 40 times as long as an untracked one, whatever the batch size.
    So the least and the largest batch size are run, and between them the line is taken. The
    peak is the largest of sums that are affine in the batch size: the line is never below it.
    """
    least, most = min(batches), max(batches)
    low = _tracked_peak(name, least)
    if least == most:
        return {least: low}
    slope = (_tracked_peak(name, most) - low) / (most - least)
    return {batch: low + slope * (batch - least) for batch in batches}


# One training step without a GPU -----------------------------------------------------------------


def _tracked_peak(name: str, batch: int) -> float:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    blank = copy.deepcopy(without_data(name))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, optimizer, step, data = _training(_faked(blank), batch)
        step()  # the optimizer has its state from here on
        tracker = MemTracker()
        tracker.track_external(model, optimizer, *data)
        with tracker:
            step()
        peak = tracker.get_tracker_snapshot("peak")
    return float(sum(device["Total"] for device in peak.values())) / MIB


def _live_peak(name: str, batch: int) -> float:
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_leaves
    from torch.utils.weak import WeakIdKeyDictionary

    class Live(TorchDispatchMode):
        """Adds up storages when they first appear, and takes them off when they die."""

        def __init__(self) -> None:
            super().__init__()
            self.seen: Any = WeakIdKeyDictionary()
            self.now = self.peak = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            self.add(result)
            return result

        def add(self, values: Any) -> None:
            for tensor in tree_leaves(values):
                if isinstance(tensor, torch.Tensor):
                    self._add(tensor.untyped_storage())

        def _add(self, storage: Any) -> None:
            if storage not in self.seen:
                size = storage.nbytes()
                self.seen[storage] = size
                self.now += size
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._gone, size)

        def _gone(self, size: int) -> None:
            self.now -= size

    live = Live()
    blank = copy.deepcopy(without_data(name))
    with FakeTensorMode(allow_non_fake_inputs=True):
        model, _, step, data = _training(_faked(blank), batch)
        live.add([*model.parameters(), *model.buffers(), *data])
        with live:
            step()
            step()
    return live.peak / MIB


def _training(model: Any, batch: int) -> tuple[Any, Any, Callable[[], None], tuple[Any, Any]]:
    """Model, optimizer, a training step and its images and labels, in the mode around."""
    import torch
    from timm.loss import LabelSmoothingCrossEntropy
    from timm.optim import create_optimizer_v2

    optimizer = create_optimizer_v2(
        model,
        opt="sgd",
        lr=0.05,
        momentum=0.9,
        weight_decay=2e-5,
        foreach=True,  # what it is on a GPU
    )
    criterion = LabelSmoothingCrossEntropy(0.1)
    images = torch.empty(batch, *model.default_cfg["input_size"])
    labels = torch.empty(batch, dtype=torch.long)

    def step() -> None:
        criterion(model(images), labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    return model, optimizer, step, (images, labels)


def _faked(model: Any) -> Any:
    """``model`` with the CPU tensors of the FakeTensorMode around; tied ones stay tied."""
    import torch

    made: dict[int, Any] = {}

    def fake(tensor: Any) -> Any:
        if id(tensor) not in made:
            size, stride = tensor.shape, tensor.stride()
            made[id(tensor)] = torch.empty_strided(size, stride, dtype=tensor.dtype, device="cpu")
        return made[id(tensor)]

    parameters: dict[int, Any] = {}
    for module in model.modules():
        for key, value in module._parameters.items():
            if value is not None:
                if id(value) not in parameters:
                    parameters[id(value)] = torch.nn.Parameter(fake(value), value.requires_grad)
                module._parameters[key] = parameters[id(value)]
        for key, value in module._buffers.items():
            if value is not None:
                module._buffers[key] = fake(value)
    return model
