"""Published peaks of fine-tuning, and what the simulated GPU says of the same jobs.

fms: foundation-model-stack/fms-acceleration, scripts/benchmarks: fms-hf-tuning on 1 and 2 A100 80
GB, 4,096 packed tokens a sample, PyTorch 2.4.1. Its tables are of two dates, and Transformers keeps
the logits in another dtype since 4.46, which changes peaks by gigabytes. --packages DIR has the
packages of then, without PyTorch, in a folder for each version of Transformers (4.48.1 for
Mistral-7B, 4.45.2 for PowerLM-3B):

    pip install --no-deps --target DIR/4.48.1 transformers==4.48.1 tokenizers==0.21.0 \\
        peft==0.14.0 accelerate==1.0.1 huggingface-hub==0.28.1 MORE
    pip install --no-deps --target DIR/4.45.2 transformers==4.45.2 tokenizers==0.20.3 \\
        peft==0.13.2 accelerate==1.0.1 huggingface-hub==0.26.2 MORE

    pip install --no-deps --target DIR/5 peft==0.21.2

MORE: requests urllib3 certifi idna charset-normalizer regex. DIR/5 is used with the installed
Transformers 5, for PEFT's own rows (bench/llm_memory.py), which are of 5.13 and peft 0.19.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from _bench import Figure, leave, needs, parser, say, table
from _llm_job import Job

GIB = 1 << 30
LIMIT_S = 900
#: The Transformers of each model's rows.
VERSIONS = {
    "mistralai/Mistral-7B-v0.1": "4.48.1",
    "ibm/PowerLM-3b": "4.45.2",
    "meta-llama/Llama-3.2-3B": "5",
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A published job with its peak in bytes."""

    job: Job
    measured: int

    @property
    def name(self) -> str:
        model = self.job.model.partition("/")[2]
        kind = f"LoRA r={self.job.rank}" if self.job.rank else "full"
        return f"{model}, {kind}, {self.job.gpus} GPU, batch {self.job.batch}"


def options(about: str | None, argv: Sequence[str] | None) -> Any:
    """Checked: the table's folder, and where the packages lie."""
    made = parser(about, quick="the smallest batch of PowerLM-3b", data="folder of the tables")
    made.add_argument("--packages", type=Path, help="folder of the packages of then (_llm_rows.py)")
    found = made.parse_args(argv)
    for version in VERSIONS.values() if found.packages is not None else ():
        if not (found.packages / version / "peft").is_dir():
            leave(f"--packages {found.packages}: there is no {version}/peft; see _llm_rows.py")
    if found.packages is None:
        needs("transformers", "peft", "accelerate")
    return found


def read(path: Path) -> list[dict[str, str]]:
    """A table's rows; ends with one line where it is not there."""
    if not path.is_file():
        leave(f"{path}: no such file; --data takes the folder with it")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fms(folder: Path, wanted: Callable[[int], bool]) -> list[Row]:
    """The table's rows with so many GPUs; 4-bit weights are left out."""
    return [
        Row(
            Job(row["model"], "A100 80GB SXM", int(row["gpus"]), int(row["batch_size"]), 4096,
                int(float(row["r"] or 0))),
            int(row["peak_allocated_bytes"]),
        )
        for row in read(folder / "fms_a100_80gb.csv")
        if wanted(int(row["gpus"])) and row["framework"] == "none"
    ]  # fmt: skip


def quick(rows: Sequence[Row]) -> list[Row]:
    """Of the small model the smallest batch of each kind."""
    small = [each for each in rows if "3b" in each.job.model.lower()]
    least = min(each.job.batch // (3 - each.job.gpus) for each in small)
    return [each for each in small if each.job.batch // (3 - each.job.gpus) == least]


def simulated(row: Row, packages: Path | None) -> dict[str, int] | str:
    """What the job's process said, or why it said nothing."""
    say(f"{row.name} ...")
    then = "" if packages is None else str(packages / VERSIONS[row.job.model])
    path = os.pathsep.join(filter(None, [then, os.environ.get("PYTHONPATH", "")]))
    script = Path(__file__).with_name("_llm_job.py")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(dataclasses.asdict(row.job))],
        env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=LIMIT_S,
    )  # fmt: skip
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no output"])[-1][:200]
    found: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def compared(
    name: str, rows: Sequence[Row], packages: Path | None, what: str, goals: tuple[float, float]
) -> tuple[list[Figure], str, dict[str, Any]]:
    """Figures (median, worst, jobs that were not simulated), a table, and details."""
    found = {row.name: simulated(row, packages) for row in rows}
    errors: dict[str, list[float]] = {}
    lines: list[tuple[object, ...]] = []
    for row in rows:
        said = found[row.name]
        if isinstance(said, str):
            lines.append((row.name, row.measured / GIB, f"not simulated: {said}"))
            continue
        percents = []
        for who in (what, "accelerate", "deepspeed"):
            percents.append(100 * (said[who] / row.measured - 1))
            errors.setdefault(who, []).append(abs(percents[-1]))
        signed = (f"{each:+.2f}%" for each in percents)
        lines.append((row.name, row.measured / GIB, said[what] / GIB, *signed))
    heads = ("job", "measured, GiB", "predicted", "error", "Accelerate's rule", "DeepSpeed's")
    ours = errors.get(what, [float("nan")])
    failed = sum(isinstance(each, str) for each in found.values())
    width = len(heads)
    filled = [(*line, *[None] * (width - len(line))) for line in lines]
    figures = [
        Figure(f"{name}_median_error", statistics.median(ours), goals[0], True, "%"),
        Figure(f"{name}_worst_error", max(ours), goals[1], True, "%"),
        Figure(f"{name}_not_simulated", failed, 0, True),
    ]
    return figures, table(heads, filled), {"rows": found}
