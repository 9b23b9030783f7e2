"""Everything about times on a machine with an NVIDIA GPU, in two and a half minutes.

One after the other on the GPU, each prepared on the CPU while the one before measures: `trainfit
calibrate` (profile.json), the `steps-…` jobs in the order of what they tell most (step_times.py,
steps/), single programs (kernels.py, kernels.json). Results are written as they come; where time
runs out, the last jobs and programs are missing.

    python bench/gpu/speed_run.py --out DIR [--limit S] [--processes N]

Then, anywhere: `bench/speed_truth.py --truth DIR/steps --profile DIR/profile.json`, and
`bench/gpu/kernel_truth.py DIR/kernels.json --profile DIR/profile.json`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import cases, children

HERE = Path(__file__).resolve().parent

#: One job of each class first; those that take long, or tell least, last.
ORDER = (
    "gpt2-bf16", "resnet50-bf16-nhwc", "hf-llama-1k-bf16-weights-adamw", "act-bf16", "vit-b16-bf16",
    "timm-convnext-tiny-bf16-nhwc", "resnet50-bf16", "peft-llama-1k-bf16-weights-adamw",
    "unet-bf16-nhwc", "hf-gpt2-bf16-dropout", "lstm-fp32-adam", "timm-efficientnet-b0-bf16-nhwc",
    "bert-base-bf16", "vit-b16-bf16-written-out", "resnet50-fp32", "gpt2-bf16-fused",
    "timm-swin-tiny-bf16-nhwc", "hf-llama-4k-bf16-weights-checkpointing", "act-fp32-forward",
    "resnet50-bf16-forward", "vit-b16-bf16-forward", "hf-llama-1k-bf16-weights-prefill",
    "gru-bf16-adam", "convnext-tiny-bf16-adamw", "act-fp32", "vit-b16-fp32", "bert-base-fp32",
    "gpt2-fp32", "hf-bert-large-fp32-adamw", "hf-llama-text-bf16-weights-decode",
)  # fmt: skip
#: Seconds for the single programs, and of the calibration at most.
KERNELS_S, CALIBRATION_S = 37, 70
#: What `trainfit calibrate` says on stderr when it needs the GPU no more.
_SIMULATES = "simulating"


def main(argv: list[str] | None = None) -> int:
    """Exit status 0 if all three parts ended well."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, required=True)
    made.add_argument("--limit", type=float, default=150.0, metavar="S")
    made.add_argument("--processes", type=int, default=6)
    options = made.parse_args(argv)
    return PartProcesses(options.out, options.limit, options.processes).run()


def ordered() -> list[str]:
    """Names of all timed jobs; those that :data:`ORDER` does not have come last."""
    names = [case.name for case in cases.timed_cases()]
    first = [f"steps-{each}" for each in ORDER]
    return [*first, *(name for name in names if name not in first)]


class PartProcesses:
    """The three parts, in processes of their own."""

    def __init__(self, out: Path, limit_s: float, processes: int) -> None:
        self._out, self._processes = out, processes
        self._end = time.time() + limit_s
        self._started: list[subprocess.Popen[bytes]] = []

    def run(self) -> int:
        (self._out / "steps").mkdir(parents=True, exist_ok=True)
        gates = [self._out / "gate-steps", self._out / "gate-kernels"]
        for gate in gates:
            gate.unlink(missing_ok=True)
        try:
            steps = self._steps(gates[0])
            calibration = self._calibrate()
            self._wait(lambda: self._simulates(calibration))
            gates[0].touch()
            kernels = self._kernels(gates[1])
            self._wait(lambda: steps.poll() is not None)
            gates[1].touch()
            self._wait(lambda: None not in (kernels.poll(), calibration.poll()))
        finally:
            for process in self._started:
                process.terminate()
        codes = [process.wait() for process in (calibration, steps, kernels)]
        left = len(list((self._out / "steps").glob("*.json.gz"))), len(ordered())
        print(f"calibrate, steps, kernels: exit {codes}; {left[0]} of {left[1]} jobs timed")
        return int(any(codes))

    def _steps(self, gate: Path) -> subprocess.Popen[bytes]:
        """They claim no job in the time that the programs need."""
        only = [word for name in ordered() for word in ("--only", f"{name[:-1]}[{name[-1]}]")]
        limit = str(self._end - time.time() - KERNELS_S - 7)
        words = ["--out", str(self._out / "steps"), "--processes", str(self._processes)]
        script = [str(HERE / "step_times.py"), *words, "--gate", str(gate)]
        # So many processes that build models take turns on the cores else.
        return self._start("steps", [*script, "--time-limit", limit, *only], OMP_NUM_THREADS="2")

    def _calibrate(self) -> subprocess.Popen[bytes]:
        words = ["--time-limit", str(CALIBRATION_S), "--output", str(self._out / "profile.json")]
        return self._start("calibrate", ["-m", "trainfit", "calibrate", *words])

    def _kernels(self, gate: Path) -> subprocess.Popen[bytes]:
        words = ["--output", str(self._out / "kernels.json"), "--gate", str(gate)]
        script = [str(HERE / "kernels.py"), *words]
        return self._start("kernels", [*script, "--time-limit", str(KERNELS_S)])

    def _start(self, name: str, words: list[str], **variables: str) -> subprocess.Popen[bytes]:
        with (self._out / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-u", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**children.environment(""), **variables},
            )
        self._started.append(process)
        return process

    def _simulates(self, calibration: subprocess.Popen[bytes]) -> bool:
        text = (self._out / "calibrate.log").read_text(errors="replace")
        return _SIMULATES in text or calibration.poll() is not None

    def _wait(self, done: Callable[[], bool]) -> None:
        while not done() and time.time() < self._end:
            time.sleep(0.1)


if __name__ == "__main__":
    sys.exit(main())
