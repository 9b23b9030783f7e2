"""The reference workload: ACT at batch 8 next to the estimate and the measurement of its author.

Runs `trainfit plan` on examples/act for an RTX 4090 (the data set is made if it is absent)
and lays the figures next to the author's table (GiB, bf16 autocast): his estimate of each
part, his estimate of the whole, and the 6.5 GiB that he measured; his arithmetic next to ours is
`trainfit memory --by-hand`. Then on the policy as his robot calls it: at 30 Hz, with the clock of
his CPU at 1.7 to 3.5 instead of 4.0 GHz, a call took 7 to 8 ms more, which has to lie within what
the plan expects of these clocks. With --gap also what could lie between our memory figure and his
measurement, each cause simulated alone.

    python bench/act.py [--dataset DIR] [--quick] [--gap] [--json]
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from _bench import GIB, ROOT, BenchFigure, answer, finish, parser, table, trainfit

EXAMPLE = ROOT / "examples" / "act"
DATASET = ROOT / "data" / "act-example"

#: The author's estimate of each part, GiB, and which modules it means.
ESTIMATE = {
    "CNN activations": ((1.5, 2.5), ("backbone", "final_conv")),
    "main encoder": ((1.3, 1.8), ("encoder",)),
    "VAE and decoder": ((0.25, 0.55), ("vae_encoder", "decoder")),
}

#: The author's formula for the main encoder, bytes: B L 2 (8 S D + 2 H S^2 + 2 S FFN).
ENCODER_BY_HAND = 8 * 4 * 2 * (8 * 842 * 512 + 2 * 8 * 842**2 + 2 * 842 * 3200)

#: What runs before the script, by the cause of the gap that it is; and the script's options.
_EVALUATE = """
import torch, model
from torch.optim.optimizer import register_optimizer_step_post_hook
forward, seen = model.ACTPolicy.forward, []
def noted(policy, batch):
    seen[:] = [policy, batch]
    return forward(policy, batch)
model.ACTPolicy.forward = noted
def evaluate(optimizer, args, kwargs):
    with torch.set_grad_enabled({grad}), torch.autocast("cuda", dtype=torch.bfloat16):
        kept = forward(*seen)
register_optimizer_step_post_hook(evaluate)
"""
GAP: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "as it is": ("", (), {}),
    "cudnn.benchmark = True": ("import torch; torch.backends.cudnn.benchmark = True", (), {}),
    "an evaluation step under no_grad": (_EVALUATE.replace("{grad}", "False"), (), {}),
    "an evaluation step that records gradients": (_EVALUATE.replace("{grad}", "True"), (), {}),
    "CUDA_MODULE_LOADING=EAGER": ("", (), {"CUDA_MODULE_LOADING": "EAGER"}),
    "float32 (autocast off)": ("", ("--amp=false",), {}),
    "batch 9": ("", ("--batch_size=9",), {}),
    "batch 10": ("", ("--batch_size=10",), {}),
}


def main() -> int:
    made = parser(__doc__, quick="the same: it is quick")
    made.add_argument("--dataset", type=Path, default=DATASET)
    made.add_argument("--gap", action="store_true", help="simulate what could explain 6.5 GiB")
    options = made.parse_args()
    make_dataset(options.dataset)
    plan = run_plan(options.dataset)
    now, other = plan["now"], plan["other_amp"]
    least, most = slower_by(plan_policy())
    allocated = now["memory"]["allocated_bytes"] / GIB
    saved = 1 - now["memory"]["allocated_bytes"] / other["memory"]["allocated_bytes"]
    figures = [
        BenchFigure("act_allocated_at_least", allocated, 5.0, False, " GiB"),
        BenchFigure("act_allocated_at_most", allocated, 7.0, True, " GiB"),
        BenchFigure("act_amp_saves", 100 * saved, 1.0, False, "%"),
        BenchFigure("act_slow_clock_least", 1e3 * least, 7.0, True, " ms"),
        BenchFigure("act_slow_clock_most", 1e3 * most, 8.0, False, " ms"),
        BenchFigure("act_plan_seconds", plan["seconds"], 60.0, True, " s"),
        BenchFigure("act_largest_batch_seconds", search_seconds(options.dataset), 1.0, True, " s"),
    ]
    gap = gap_runs(options.dataset) if options.gap else {}
    tables = [beside_estimate(now, by_hand(options.dataset)), *([gap_table(gap)] if gap else [])]
    return finish(figures, options.json, {"plan": plan, "gap": gap}, tables)


def make_dataset(folder: Path) -> None:
    command = [sys.executable, str(EXAMPLE / "make_dataset.py"), "--out", str(folder)]
    subprocess.run(command, check=True, stdout=sys.stderr)


def run_plan(dataset: Path, *options: str) -> dict[str, Any]:
    script = ("python", str(EXAMPLE / "train.py"), f"--dataset={dataset}")
    settings = ("--batch_size={batch_size:8}", "--amp={amp:true}")
    return answer("plan", "--gpu", "RTX 4090", *options, "--", *script, *settings)


def plan_policy() -> dict[str, Any]:
    """Of calls of the policy by a CPU of 4 GHz, as the author's was."""
    policy = ("python", str(EXAMPLE / "policy.py"))
    return answer("plan", "--gpu", "RTX 4090", "--cpu", "ghz=4", "--", *policy)


def slower_by(plan: dict[str, Any]) -> tuple[float, float]:
    """What a call takes more at 3.5 and at 1.7 of 4.0 GHz, in seconds."""
    now = plan["speed"]["now"]["seconds"]
    high, low = (each["seconds"] - now for each in plan["speed"]["paced"]["slowed"])
    return high, low


def search_seconds(dataset: Path) -> float:
    """CPU time from two recordings to the largest batch that fits."""
    from trainfit.hardware import find_gpu
    from trainfit.memory.affine import AffineStream
    from trainfit.memory.capacity import largest_batch
    from trainfit.results.runs.recording import Recording

    recordings = []
    with tempfile.TemporaryDirectory() as folder:
        for batch in (8, 16):
            file = simulated(dataset, Path(folder), words=(f"--batch_size={batch}",))
            recordings.append(Recording.load(file))
    gpu = find_gpu("RTX 4090")
    started = time.process_time()
    law = AffineStream.between(recordings[0], 8, recordings[1], 16)
    largest_batch(law, gpu.memory_bytes, gpu.context_bytes)
    return time.process_time() - started


def by_hand(dataset: Path) -> dict[str, Any]:
    """What `trainfit memory --by-hand` says of the run at batch 8."""
    with tempfile.TemporaryDirectory() as folder:
        return answer("memory", "--by-hand", str(simulated(dataset, Path(folder))))


def simulated(
    dataset: Path, folder: Path, before: str = "", words: tuple[str, ...] = (), **env: str
) -> Path:
    """The recording of the script, with Python code that runs ``before`` it."""
    script = folder / "run.py"
    code = f"import runpy, sys\nsys.path.insert(0, {str(EXAMPLE)!r})\n{before}\n"
    code += f"runpy.run_path({str(EXAMPLE / 'train.py')!r}, run_name='__main__')\n"
    script.write_text(code)
    file = folder / "run.trainfit"
    command = (str(script), f"--dataset={dataset}", "--batch_size=8", "--amp=true", *words)
    simulate = ("simulate", "--gpu", "RTX 4090", "--output", str(file))
    trainfit(*simulate, *command, check=True, env=env)
    return file


def gap_runs(dataset: Path) -> dict[str, dict[str, Any]]:
    """The memory figures of each cause of the gap."""
    from trainfit.memory.explanation import summarize
    from trainfit.results.runs.recording import Recording

    runs = {}
    for name, (before, words, env) in GAP.items():
        with tempfile.TemporaryDirectory() as folder:
            file = simulated(dataset, Path(folder), before, words, **env)
            summary = summarize(Recording.load(file), name)
        memory = summary.memory
        runs[name] = {
            "allocated_bytes": memory.allocated_bytes,
            "reserved_bytes": memory.reserved_bytes,
            "device_bytes": memory.device_bytes,
            "device_range_bytes": memory.device_range_bytes,
            "assumptions": list(summary.assumptions),
        }
    return runs


def gap_table(gap: dict[str, dict[str, Any]]) -> str:
    """What each cause adds, GiB."""
    usual = gap["as it is"]["device_bytes"]
    rows = [
        [name, *(found[f"{kind}_bytes"] / GIB for kind in ("allocated", "reserved", "device")),
         f"{(found['device_bytes'] - usual) / GIB:+.2f}"]
        for name, found in gap.items()
    ]  # fmt: skip
    return table(("cause, GiB", "allocated", "reserved", "device", "more"), rows)


def beside_estimate(now: dict[str, Any], hand: dict[str, Any]) -> str:
    """Parts of the peak next to the author's estimate; all in GiB."""
    kinds, modules = now["by_kind_bytes"], now["by_module_bytes"]
    states = sum(kinds[kind] for kind in ("parameter", "gradient", "optimizer_state"))
    rows: list[tuple[object, ...]] = [("parameters, gradients, AdamW", states / GIB, "0.9 to 1.3")]
    for title, ((low, high), names) in ESTIMATE.items():
        total = sum(modules.get(f"ACTPolicy.{name}", 0) for name in names)
        rows.append((f"{title} (with its parameters)", total / GIB, f"{low} to {high}"))
    memory = now["memory"]
    rows.append(("allocated", memory["allocated_bytes"] / GIB, "5.0 to 7.0"))
    rows.append(("device (measured 6.5)", memory["device_bytes"] / GIB, "6.5 to 9.5"))
    (encoder,) = [part for part in hand["parts"] if part["path"] == "ACTPolicy.encoder"]
    rows.append(("encoder, by the author's formula", encoder["by_hand_bytes"] / GIB,
                 f"{ENCODER_BY_HAND / GIB:.2f}"))  # fmt: skip
    total = [(hand["by_hand_bytes"] + part) / GIB for part in hand["buffer_bytes"]]
    rows.append(("sum by hand, with 10 to 30%", f"{total[0]:.2f} to {total[1]:.2f}", None))
    return table(("part", "simulated", "estimated, GiB"), rows)


if __name__ == "__main__":
    sys.exit(main())
