"""The reference workload: ACT at batch 8 beside the estimate and the measurement of its author.

Runs `trainfit plan` on examples/act for an RTX 4090 (the data set is made if it is absent)
and lays the figures beside the author's table (GiB, bf16 autocast): his estimate of each
part, his estimate of the whole, and the 6.5 GiB that he measured. Then on the policy as his robot
calls it: at 30 Hz, with the clock of his CPU at 1.7 to 3.5 instead of 4.0 GHz, a call took 7 to
8 ms more, which has to lie within what the plan expects of these clocks.

    python bench/act.py [--dataset DIR] [--quick] [--json]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _bench import Figure, finish

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "act"
GIB = 1 << 30

#: The author's estimate of each part, GiB, and which modules it means.
ESTIMATE = {
    "CNN activations": ((1.5, 2.5), ("backbone", "final_conv")),
    "main encoder": ((1.3, 1.8), ("encoder",)),
    "VAE and decoder": ((0.25, 0.55), ("vae_encoder", "decoder")),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dataset", type=Path, default=ROOT / "data" / "act-example")
    parser.add_argument("--quick", action="store_true", help="the same: it is quick")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    make_dataset(options.dataset)
    plan = run_plan(options.dataset)
    now, other = plan["now"], plan["other_amp"]
    least, most = slower_by(plan_policy())
    if not options.json:
        print_beside_estimate(now)
    allocated = now["memory"]["allocated_bytes"] / GIB
    saved = 1 - now["memory"]["allocated_bytes"] / other["memory"]["allocated_bytes"]
    figures = [
        Figure("act_allocated_at_least", allocated, 5.0, False, " GiB"),
        Figure("act_allocated_at_most", allocated, 7.0, True, " GiB"),
        Figure("act_amp_saves", 100 * saved, 1.0, False, "%"),
        Figure("act_slow_clock_least", 1e3 * least, 7.0, True, " ms"),
        Figure("act_slow_clock_most", 1e3 * most, 8.0, False, " ms"),
        Figure("act_plan_seconds", plan["seconds"], 60.0, True, " s"),
        Figure("act_largest_batch_seconds", search_seconds(options.dataset), 1.0, True, " s"),
    ]
    return finish(figures, options.json, {"plan": plan})


def make_dataset(folder: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "make_dataset.py"), "--out", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def run_plan(dataset: Path) -> dict[str, Any]:
    command = [
        *(sys.executable, "-m", "trainfit", "plan", "--gpu", "RTX 4090", "--json", "--"),
        *("python", str(EXAMPLE / "train.py"), f"--dataset={dataset}"),
        *("--batch_size={batch_size:8}", "--amp={amp:true}"),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def plan_policy() -> dict[str, Any]:
    """Of calls of the policy by a CPU of 4 GHz, as the author's was."""
    command = [
        *(sys.executable, "-m", "trainfit", "plan", "--gpu", "RTX 4090", "--cpu", "ghz=4"),
        *("--json", "--", "python", str(EXAMPLE / "policy.py")),
    ]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def slower_by(plan: dict[str, Any]) -> tuple[float, float]:
    """What a call takes more at 3.5 and at 1.7 of 4.0 GHz, in seconds."""
    now = plan["speed"]["now"]["seconds"]
    high, low = (each["seconds"] - now for each in plan["speed"]["paced"]["slowed"])
    return high, low


def search_seconds(dataset: Path) -> float:
    """CPU time from two recordings to the largest batch that fits."""
    from trainfit.hardware import find_gpu
    from trainfit.memory.affine import AffineStream
    from trainfit.memory.fit import largest_batch
    from trainfit.results.recording import Recording

    recordings = []
    with tempfile.TemporaryDirectory() as folder:
        for batch in (8, 16):
            file = Path(folder) / f"{batch}.trainfit"
            command = [
                *(sys.executable, "-m", "trainfit", "simulate", "--gpu", "RTX 4090"),
                *("--output", str(file), str(EXAMPLE / "train.py"), f"--dataset={dataset}"),
                *(f"--batch_size={batch}", "--amp=true"),
            ]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            recordings.append(Recording.load(file))
    gpu = find_gpu("RTX 4090")
    started = time.process_time()
    law = AffineStream.between(recordings[0], 8, recordings[1], 16)
    largest_batch(law, gpu.memory_bytes, gpu.context_bytes)
    return time.process_time() - started


def print_beside_estimate(now: dict[str, Any]) -> None:
    """Parts of the peak beside the author's estimate; all in GiB."""
    kinds, modules = now["by_kind_bytes"], now["by_module_bytes"]
    states = sum(kinds[kind] for kind in ("parameter", "gradient", "optimizer_state"))
    rows = [("parameters, gradients, AdamW", states / GIB, (0.9, 1.3))]
    for title, (span, names) in ESTIMATE.items():
        total = sum(modules.get(f"ACTPolicy.{name}", 0) for name in names)
        rows.append((f"{title} (with its parameters)", total / GIB, span))
    memory = now["memory"]
    rows.append(("allocated", memory["allocated_bytes"] / GIB, (5.0, 7.0)))
    rows.append(("device (measured 6.5)", memory["device_bytes"] / GIB, (6.5, 9.5)))
    print(f"{'part':<44}{'simulated':>10}   estimated, GiB")
    for title, value, (low, high) in rows:
        print(f"{title:<44}{value:>10.2f}   {low} to {high}")


if __name__ == "__main__":
    sys.exit(main())
