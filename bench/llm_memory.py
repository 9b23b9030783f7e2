"""Memory of fine-tuning on one GPU and by FSDP on two, against published runs.

    fms, fsdp   peak allocated (rank 0) of fms-acceleration's rows on one A100 80 GB, and on one and
                two: Mistral-7B and PowerLM-3B, full and LoRA, 4,096 packed tokens a sample, in the
                Trainer's own loop with gradient checkpointing; two GPUs by FSDP's full shards
    peft        the reserved maximum of PEFT's method comparison on an L40S: Llama-3.2-3B, full and
                LoRA, four samples of at most 768 tokens. Which lengths came together there is not
                published: the longest are taken

Beside them what Accelerate's and DeepSpeed's rules of thumb give.

    python bench/llm_memory.py --data FOLDER [--packages DIR] [--fsdp] [--quick] [--json]

fms is foundation-model-stack/fms-acceleration, scripts/benchmarks: fms-hf-tuning with PyTorch
2.4.1. Its tables are of two dates, and Transformers keeps the logits in another dtype since 4.46,
which changes peaks by gigabytes. --packages DIR has the packages of then, without PyTorch, in a
folder for each version of Transformers (4.48.1 for Mistral-7B, 4.45.2 for PowerLM-3B):

    pip install --no-deps --target DIR/4.48.1 transformers==4.48.1 tokenizers==0.21.0 \\
        peft==0.14.0 accelerate==1.0.1 huggingface-hub==0.28.1 MORE
    pip install --no-deps --target DIR/4.45.2 transformers==4.45.2 tokenizers==0.20.3 \\
        peft==0.13.2 accelerate==1.0.1 huggingface-hub==0.26.2 MORE

    pip install --no-deps --target DIR/5 peft==0.21.2

MORE: requests urllib3 certifi idna charset-normalizer regex. DIR/5 is used with the installed
Transformers 5, for PEFT's own rows, which are of 5.13 and peft 0.19.
"""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from _bench import GIB, BenchFigure, finish, leave, needs, parser, say, table
from _llm_job import FineTuningJob

LIMIT_S = 900
LONGEST = 768
#: The Transformers of each model's rows.
VERSIONS = {
    "mistralai/Mistral-7B-v0.1": "4.48.1",
    "ibm/PowerLM-3b": "4.45.2",
    "meta-llama/Llama-3.2-3B": "5",
}
#: Whose rules stand next to the prediction.
RULES = ("accelerate", "deepspeed")
#: By row: peaks in bytes by who predicts them, or why the job was not simulated.
Answers = dict[str, dict[str, int] | str]


@dataclasses.dataclass(frozen=True)
class PublishedPeak:
    """A published job with its peak in bytes."""

    job: FineTuningJob
    measured: int

    @property
    def name(self) -> str:
        model = self.job.model.partition("/")[2]
        kind = f"LoRA r={self.job.rank}" if self.job.rank else "full"
        return f"{model}, {kind}, {self.job.gpus} GPU, batch {self.job.batch}"


def main(argv: Sequence[str] | None = None) -> int:
    options = parse(argv)
    packed, longest = fms(options.data), [] if options.fsdp else peft(options.data)
    packed = smallest(packed) if options.quick else packed
    answers: Answers = {row.name: simulated(row, options.packages) for row in [*packed, *longest]}
    alone = [row for row in packed if row.job.gpus == 1]
    figures = compared("fsdp", packed, answers, "allocated", (1.0, 5.0))
    tables = [shown(packed, answers, "allocated")]
    if not options.fsdp:
        figures += compared("fms", alone, answers, "allocated", (0.7, 4.0))
        figures += compared("peft", longest, answers, "reserved", (3.0, 3.0))
        tables.append(shown(longest, answers, "reserved"))
    return finish(figures, options.json, {"rows": answers}, tables)


def parse(argv: Sequence[str] | None) -> Any:
    """Checked: where the packages lie."""
    made = parser(__doc__, quick="the smallest batch of PowerLM-3b", data="folder of the tables")
    made.add_argument("--packages", type=Path, help="folder of the packages of then (see above)")
    made.add_argument("--fsdp", action="store_true", help="rank 0 of fms's rows alone")
    options = made.parse_args(argv)
    for version in VERSIONS.values() if options.packages is not None else ():
        if not (options.packages / version / "peft").is_dir():
            leave(f"--packages {options.packages}: there is no {version}/peft; see --help")
    if options.packages is None:
        needs("transformers", "peft", "accelerate")
    return options


def read(path: Path) -> list[dict[str, str]]:
    """A table's rows; ends with one line where it is not there."""
    if not path.is_file():
        leave(f"{path}: no such file; --data takes the folder with it")
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def fms(folder: Path) -> list[PublishedPeak]:
    """The table's rows; 4-bit weights are left out."""
    return [
        PublishedPeak(
            FineTuningJob(
                row["model"],
                "A100 80GB SXM",
                int(row["gpus"]),
                int(row["batch_size"]),
                4096,
                int(float(row["r"] or 0)),
            ),
            int(row["peak_allocated_bytes"]),
        )
        for row in read(folder / "fms_a100_80gb.csv")
        if row["framework"] == "none"
    ]  # fmt: skip


def peft(folder: Path) -> list[PublishedPeak]:
    """Rows of language models."""
    return [
        PublishedPeak(
            FineTuningJob(row["model"], "L40S", 1, int(row["batch_size"]), LONGEST,
                32 if row["experiment"].startswith("lora") else 0, "peft"),
            int(row["reserved_max_bytes"]),
        )
        for row in read(folder / "peft_l40s.csv")
        if row["task"] == "MetaMathQA"
    ]  # fmt: skip


def smallest(rows: Sequence[PublishedPeak]) -> list[PublishedPeak]:
    """Of the small model the smallest batch of each kind."""
    small = [row for row in rows if "3b" in row.job.model.lower()]
    least = min(row.job.batch // (3 - row.job.gpus) for row in small)
    return [row for row in small if row.job.batch // (3 - row.job.gpus) == least]


def simulated(row: PublishedPeak, packages: Path | None) -> dict[str, int] | str:
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
    peaks: dict[str, int] = json.loads(done.stdout.strip().splitlines()[-1])
    return peaks


def compared(
    name: str,
    rows: Sequence[PublishedPeak],
    answers: Answers,
    what: str,
    goals: tuple[float, float],
) -> list[BenchFigure]:
    """Median, worst, and jobs that were not simulated."""
    errors, failed = [], 0
    for row in rows:
        peaks = answers[row.name]
        if isinstance(peaks, str):
            failed += 1
        else:
            errors.append(abs(percent(peaks[what], row)))
    errors = errors or [float("nan")]
    return [
        BenchFigure(f"{name}_median_error", statistics.median(errors), goals[0], True, "%"),
        BenchFigure(f"{name}_worst_error", max(errors), goals[1], True, "%"),
        BenchFigure(f"{name}_not_simulated", failed, 0, True),
    ]


def shown(rows: Sequence[PublishedPeak], answers: Answers, what: str) -> str:
    """A row for each job."""
    heads = ("job", "measured, GiB", "predicted", "error", "Accelerate's rule", "DeepSpeed's")
    lines: list[tuple[object, ...]] = []
    for row in rows:
        peaks = answers[row.name]
        if isinstance(peaks, str):
            cells: tuple[object, ...] = (f"not simulated: {peaks}", None, None, None)
        else:
            signed = (f"{percent(peaks[who], row):+.2f}%" for who in (what, *RULES))
            cells = (peaks[what] / GIB, *signed)
        lines.append((row.name, row.measured / GIB, *cells))
    return table(heads, lines)


def percent(predicted: int, row: PublishedPeak) -> float:
    """By how much a prediction is more than what was measured."""
    return 100 * (predicted / row.measured - 1)


if __name__ == "__main__":
    sys.exit(main())
