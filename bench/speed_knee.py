"""Where a batch sweep saturates: ResNet-50's inference on a T4, as NVIDIA published it.

The tables are those of "Inference performance: NVIDIA T4" in the README of
PyTorch/Classification/ConvNets/resnet50v1.5 of https://github.com/NVIDIA/DeepLearningExamples
(images a second at batch sizes 1 to 256, float32 and mixed precision, PyTorch of early 2021). The
model is simulated at each batch size; nothing is fitted to the tables but for the watts that the
shader cores of a T4 take (`speed/kernel_times`). The knee is the smallest
batch size with 95% of the most images a second; a step is from one batch size to the next.

    python bench/speed_knee.py [--quick] [--json]
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from _bench import Figure, finish, quick_options

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

import torch

import trainfit
from trainfit.hardware import find_gpu
from trainfit.plan.sizing.costing import machine_of
from trainfit.results.speed import KNEE
from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators
from trainfit.speed.step import step_time
from trainfit.speed.work import Work

BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
#: Images a second.
PUBLISHED: Mapping[str, Sequence[float]] = {
    "float32": (98, 186, 325, 363, 409, 420, 428, 426, 415),
    "mixed": (79, 156, 317, 652, 1050, 1128, 1165, 1190, 1198),
}
GPU = "T4"


def main() -> int:
    options = quick_options(__doc__)
    figures, details = [], {}
    for precision, measured in PUBLISHED.items():
        predicted = [batch / s for batch, s in zip(BATCHES, seconds(precision), strict=True)]
        apart = abs(knee(predicted) - knee(measured))
        errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
        figures.append(Figure(f"t4_{precision}_knee_steps_apart", apart, 1, True))
        details[precision] = {
            "batches": BATCHES,
            "predicted_images_per_s": [round(each, 1) for each in predicted],
            "published_images_per_s": measured,
            "median_error": statistics.median(errors),
            "knee": BATCHES[knee(predicted)],
            "published_knee": BATCHES[knee(measured)],
        }
        if not options.json:
            print(_table(precision, predicted, measured), file=sys.stderr)
    return finish(figures, options.json, details)


def knee(rates: Sequence[float]) -> int:
    """The place of the first rate that is nearly the highest."""
    return next(i for i, rate in enumerate(rates) if rate >= KNEE * max(rates))


def seconds(precision: str) -> list[float]:
    """Predicted, of a batch at each size."""
    warnings.filterwarnings("ignore")
    define_torchvision_operators()  # which torchvision's CPU build lacks, and timm imports
    import timm

    mixed = precision == "mixed"
    layout = torch.channels_last if mixed else torch.contiguous_format
    with trainfit.simulate(GPU, limited=False) as simulation:
        torch.backends.cudnn.benchmark = True
        model = timm.create_model("tv_resnet50", pretrained=False).eval()
        model = model.to(device="cuda", memory_format=layout)
        simulation.end_step()  # making the model is a step of its own
        for batch in BATCHES:
            images = torch.empty((batch, 3, 224, 224), device="cuda")
            images = images.contiguous(memory_format=layout)
            context: Any = torch.autocast("cuda", dtype=torch.float16)
            with torch.no_grad(), context if mixed else contextlib.nullcontext():
                model(images)
            simulation.end_step()
    machine = machine_of(find_gpu(GPU))
    works = [Work.of_step(simulation.recording, step + 1) for step in range(len(BATCHES))]
    return [step_time(work, machine).seconds for work in works]


def _table(precision: str, predicted: Sequence[float], measured: Sequence[float]) -> str:
    rows = [f"{GPU}, {precision}: batch size, images/s predicted, published"]
    for batch, ours, theirs in zip(BATCHES, predicted, measured, strict=True):
        rows.append(f"{batch:>6}{ours:>9.0f}{theirs:>7.0f}  {100 * (ours / theirs - 1):+.0f}%")
    return "\n".join(rows)


if __name__ == "__main__":
    sys.exit(main())
