"""The runs of a plan: what waits for them hears Ctrl-C."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from helpers_cli import SCRIPTS
from trainfit.hardware import find_gpu
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.runs.failures import ScriptError
from trainfit.plan.runs.runs import Runs, result_of
from trainfit.plan.runs.tracing import Trace, Tracer
from trainfit.results.runs.recording import Recording
from trainfit.results.runs.spec import AS_WRITTEN, REQUEST_FILE, RunSpec
from trainfit.results.runs.steps import StepMakeup
from trainfit.results.runs.trace import TraceOutcome


def test_ctrl_c_is_heard_that_does_not_wake_the_main_thread() -> None:
    """A signal handled in another thread does not, nor one that comes just before the wait."""
    future: Future[Trace] = Future()
    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores it
    threading.Timer(0.3, signal.raise_signal, [signal.SIGINT]).start()
    late = threading.Timer(30.0, future.cancel)
    late.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            result_of(future)
        assert not future.done()
    finally:
        late.cancel()
        signal.signal(signal.SIGINT, former)


def test_a_run_that_fills_the_ram_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        is_stopped = False

        def trace(self, *_: object, look: Callable[[], None], **__: object) -> None:
            monkeypatch.setattr(runs._gate, "_available", lambda: 1)
            monkeypatch.setattr(runs._gate, "_taken_by_others", lambda gone: "")
            look()

        def stop(self) -> None: ...

    command = parse_command(["python", str(SCRIPTS / "plain.py")])
    with Runs(command, cast(Tracer, Full()), lambda text: None) as runs:
        assert runs.attempt(None, AS_WRITTEN).outcome.status == "died"
        with pytest.raises(ScriptError, match="1 B of RAM are left") as error:
            runs.trace(None, AS_WRITTEN)
    assert "so trainfit ended it" in str(error.value) and 'torch.device("cuda")' in str(error.value)


@pytest.mark.parametrize(
    ("makeups", "kept"),
    [
        ({}, False),
        ({4: (4, 2, 8), 8: (8, 1, 8)}, True),  # LitGPT's global batch size
        ({4: (4, 4, 16)}, False),  # accumulates as often
        ({4: (4, 2, 8), 8: (8, 4, 32)}, False),
        ({6: (6, 1, 6), 4: (4, 2, 8)}, True),  # which does not divide it
        ({6: (6, 1, 6)}, False),
    ],
)
def test_runs_at_other_batch_sizes_say_whether_the_script_keeps_the_samples_of_a_step(
    makeups: dict[int, tuple[int, int, int]], kept: bool
) -> None:
    class Seen:
        def trace(self, spec: RunSpec, **_: object) -> Trace:
            makeup = StepMakeup(*makeups[int(spec.values["batch_size"])])
            recording = cast(Recording, SimpleNamespace(makeup=makeup))
            return Trace(TraceOutcome("finished", 3, 1.0), recording, "")

        def stop(self) -> None: ...

    command = parse_command(["python", str(SCRIPTS / "plain.py"), "{batch_size:2}"])
    with Runs(command, cast(Tracer, Seen()), lambda text: None) as runs:
        for size in makeups:
            runs.attempt(size, AS_WRITTEN)
        found = runs.with_evidence(2, StepMakeup(2, 4, 8))
    assert found == StepMakeup(2, 4, 8, is_kept=kept)


@pytest.mark.parametrize(
    ("asked", "steps", "told"), [(1, None, (12, True)), (3, None, (3, False)), (3, 5, (5, False))]
)
def test_a_run_that_shows_an_option_has_few_steps(
    monkeypatch: pytest.MonkeyPatch, asked: int, steps: int | None, told: tuple[int, bool]
) -> None:
    """It does not go on until memory settles; what the user says counts before."""
    made: list[RunSpec] = []

    def run(_: Tracer, folder: Path, *__: object) -> Trace:
        made.append(RunSpec.load(folder / REQUEST_FILE))
        return Trace(TraceOutcome("finished"), None, "")

    monkeypatch.setattr(Tracer, "_run", run)
    command = parse_command(["python", str(SCRIPTS / "plain.py"), "--n", "{grad_accum:2}"])
    with Tracer(command, find_gpu("T4"), steps=steps, only_training=True) as tracer:
        tracer.trace(RunSpec(values={"grad_accum": "1"}, steps=asked))
    assert (made[0].steps, made[0].until_settled) == told
    assert made[0].only_training is (steps is None)


RAMPS = """import torch
from torch.utils.data import DataLoader, TensorDataset

model = torch.nn.Linear(4, 4).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = DataLoader(TensorDataset(torch.zeros(48, 4)), batch_size=4)
steps = done = last = 0
for epoch in range(4):
    model.train()
    for (x,) in data:
        accumulate = RAMP
        model(x.cuda()).sum().backward()
        done += 1
        if done - last >= accumulate:
            optimizer.step()
            optimizer.zero_grad()
            last, steps = done, steps + 1
    model.eval()
    with torch.no_grad():
        for (x,) in data:
            model(x.cuda())
"""


@pytest.mark.parametrize(
    ("ramp", "passes"), [("2 ** min(3, steps)", [1, 2, 4, 8, 8]), ("1", [1, 1, 1])]
)
def test_a_warm_up_of_accumulation_is_simulated_to_its_end(
    tmp_path: Path, ramp: str, passes: list[int]
) -> None:
    """An epoch of 12 batches ends in the middle of it: another follows. Without one, the first
    evaluation ends the run of the steps."""
    (tmp_path / "train.py").write_text(RAMPS.replace("RAMP", ramp))
    command = parse_command(["python", str(tmp_path / "train.py")])
    with Tracer(command, find_gpu("T4"), only_training=True) as tracer:
        feeds = tracer.trace().outcome.feeds
    assert [feed.backwards for feed in feeds][: len(passes)] == passes
    assert ramp != "1" or len(feeds) <= 12


#: Three optimizers that step one after the other, with a rollout before each update.
_IN_TURNS = """
import torch
from torch import nn
policy, critic, scale = nn.Linear(8, 8).cuda(), nn.Linear(8, 1).cuda(), nn.Linear(1, 1).cuda()
opts = [torch.optim.SGD(each.parameters(), 1e-3) for each in (critic, policy, scale)]
for t in range(100):
    with torch.no_grad():
        x = policy(torch.zeros(1, 8).cuda()).cpu()
    batch = torch.zeros(32, 8).cuda()
    for loss, opt in (
        (lambda: critic(batch).mean(), opts[0]),
        (lambda: policy(batch).mean(), opts[1]),
        (lambda: scale(batch[:, :1]).mean(), opts[2]),
    ):
        opt.zero_grad()
        loss().backward()
        opt.step()
"""


def test_a_run_of_steps_alone_has_whole_periods_of_its_optimizers(tmp_path: Path) -> None:
    """The first period was three steps, as nothing told of its optimizers: two whole ones come
    after it, whatever looks like an evaluation in between."""
    script = tmp_path / "train.py"
    script.write_text(_IN_TURNS)
    with Tracer(
        parse_command(["python", str(script)]), find_gpu("T4"), only_training=True
    ) as tracer:
        recording = tracer.trace(RunSpec()).recording
    assert recording is not None and recording.steps >= 3 + 2
    forwards = [
        sum(
            "addmm" in recording.strings[name]
            for name in recording.op_name[recording.op_step == step]
        )
        for step in range(recording.steps)
    ]
    assert forwards[3:] == [4, 4]  # the rollout, and each forward pass
