"""Texts continued from their first tokens, against the same texts simulated to the end.

Each case is a small model that generates: `generate()` of Transformers with a growing cache, with
padded prompts, with a sliding window that fills within the text, and a loop of a script's own. It
is simulated twice: as `plan` and `simulate` do (64 calls of the model at most), and call by call.
Compared are the peaks of allocated and reserved memory, also over the last call alone, and the time
of all calls. It takes an hour: a call of these models is some 250 simulated operators.

    python bench/generation.py [--quick] [--json]

Needs transformers. Exit status: 0 if every goal holds, 1 if one does not, 3 without transformers.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from _bench import BenchFigure, finish, needs, parser, say

from trainfit.hardware import find_gpu
from trainfit.memory.replay import Stream, replay
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.tracing import Tracer, recording_of
from trainfit.plan.sizing.costing import machine_of
from trainfit.plan.sizing.generation import decode_seconds
from trainfit.results.runs.generation import generated_text
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import RunSpec
from trainfit.speed.step import HostedGpu, step_time
from trainfit.speed.work import COLUMNS, Work

GPU = "RTX 4090"
LENGTHS = (2048, 8192)
QUICK_LENGTHS = (512,)
MOST_CALLS = 64
MEMORY_PERCENT = 0.5
TIME_PERCENT = 2.0

_MODEL = """
import sys, torch
from transformers import MistralConfig, MistralForCausalLM
new, window = int(sys.argv[1]), int(sys.argv[2]) or None
torch.set_default_dtype(torch.float16)
config = MistralConfig(
    vocab_size=32000, hidden_size=1024, intermediate_size=4096, num_hidden_layers=2,
    num_attention_heads=16, num_key_value_heads=16, max_position_embeddings=32768,
    sliding_window=window,
)
with torch.device("cuda"):
    model = MistralForCausalLM(config).eval()
ids = torch.randint(0, 2000, (8, 100), device="cuda")
"""
_GENERATE = """
mask = torch.ones_like(ids)
mask[0, :5] = int(sys.argv[3])
model.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, pad_token_id=0)
"""
_LOOP = """
with torch.no_grad():
    out = model(ids, use_cache=True)
    for _ in range(new - 1):
        token = out.logits[:, -1:].argmax(-1)
        out = model(token, past_key_values=out.past_key_values, use_cache=True)
"""


@dataclasses.dataclass(frozen=True)
class GenerationCase:
    """A way to generate; ``window`` and ``mask`` are arguments of its script."""

    name: str
    script: str
    window: int = 0
    mask: int = 1


CASES = (
    GenerationCase("generate()", _MODEL + _GENERATE),
    GenerationCase("generate(), padded prompts", _MODEL + _GENERATE, mask=0),
    GenerationCase("generate(), sliding window", _MODEL + _GENERATE, window=400),
    GenerationCase("a loop of the script's own", _MODEL + _LOOP),
)


@dataclasses.dataclass(frozen=True)
class Seen:
    """What a run says: peaks in bytes (allocated, reserved, allocated in the last call), seconds of
    the calls after the prompt's, and how many calls were simulated."""

    allocated: int
    reserved: int
    last: int
    seconds: float
    simulated: int


def main() -> int:
    options = parser(__doc__, quick=f"{QUICK_LENGTHS[0]} new tokens").parse_args()
    needs("transformers")
    figures, details = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for length in QUICK_LENGTHS if options.quick else LENGTHS:
            for case in CASES:
                name = f"{case.name}, {length:,} new tokens"
                say(f"{name} ...")
                short = seen(case, length, Path(folder), whole=False)
                full = seen(case, length, Path(folder), whole=True)
                figures += compared(name, short, full)
                details[name] = [dataclasses.asdict(each) for each in (short, full)]
    return finish(figures, options.json, details)


def seen(case: GenerationCase, length: int, folder: Path, *, whole: bool) -> Seen:
    """A run of ``case``; ``whole``: every call of it is simulated."""
    script = folder / "generating.py"
    script.write_text(case.script)
    words = [sys.executable, str(script), str(length), str(case.window), str(case.mask)]
    tracer = Tracer(
        parse_command(words),
        find_gpu(GPU),
        steps=length if whole else None,
        time_limit_s=3600.0,
    )
    with tracer:
        recording = recording_of(tracer.trace(RunSpec(count="calls")))
    outcome = replay(Stream.of(recording))
    simulated = (recording.simulated or recording).steps
    return Seen(
        outcome.peak_allocated,
        outcome.peak_reserved,
        outcome.step_peaks[-1][0],
        _seconds(recording, machine_of(find_gpu(GPU))),
        simulated,
    )


def _seconds(recording: Recording, machine: HostedGpu) -> float:
    """Of all calls but the prompt's: one by one where they are all there."""
    text = generated_text(recording)
    assert text is not None
    if recording.simulated is not None:
        return float(decode_seconds(recording, text, machine).sum())
    assert not text.calls_left, "not every call was simulated"
    return sum(step_time(work, machine).seconds for work in _works(recording, text.prefill + 1))


def _works(recording: Recording, first: int) -> Iterator[Work]:
    """The kernels of each step from ``first`` on."""
    table = np.stack([getattr(recording, f"kernel_{name}") for name in COLUMNS], axis=1)
    ends = np.searchsorted(recording.op_step, np.arange(recording.steps + 1))
    rows = np.searchsorted(recording.kernel_op, ends)
    for step in range(first, recording.steps):
        ops, mine = slice(ends[step], ends[step + 1]), slice(rows[step], rows[step + 1])
        yield Work(
            table[mine],
            recording.kernel_stream[mine],
            recording.kernel_op[mine] - ends[step],
            recording.op_phase[ops],
        )


def compared(name: str, short: Seen, full: Seen) -> Iterator[BenchFigure]:
    """The figures of a case."""
    for what in ("allocated", "reserved", "last"):
        title = "allocated in the last call" if what == "last" else f"{what} peak"
        yield _error(f"{name}: {title}", getattr(short, what), getattr(full, what), MEMORY_PERCENT)
    yield _error(f"{name}: time", short.seconds, full.seconds, TIME_PERCENT)
    yield BenchFigure(f"{name}: simulated calls", short.simulated, MOST_CALLS, at_most=True)


def _error(name: str, value: float, truth: float, goal: float) -> BenchFigure:
    return BenchFigure(name, abs(100 * (value / truth - 1)), goal, at_most=True, unit="%")


if __name__ == "__main__":
    sys.exit(main())
