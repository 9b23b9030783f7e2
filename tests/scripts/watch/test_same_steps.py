"""Simulated, real and watched runs of one loop have the same steps."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainfit as package
from helpers_cli import json_of, trainfit
from helpers_recorder import recorded
from trainfit.results.runs.spec import RunSpec
from trainfit.results.runs.trace import ScriptOutcome, Target
from trainfit.results.runs.watched import load_run
from trainfit.scripts.dataloader import LoaderTracker
from trainfit.scripts.real_run import ScriptRun
from trainfit.scripts.steps import StepWatch
from trainfit.simgpu.patching import PatchSet
from trainfit.watch.recorder import recorder as recorder_module

#: Batches of each loop, and samples of a batch.
BATCHES, SIZE = 20, 4


def batches() -> DataLoader[Any]:
    return DataLoader(torch.ones(BATCHES * SIZE, 8), SIZE)  # type: ignore[arg-type]


def net(device: str, width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)).to(device)


def plain(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch in batches():
        optimizer.zero_grad()
        model(batch.to(device)).sum().backward()
        optimizer.step()


def accumulating(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.AdamW(model.parameters())
    for number, batch in enumerate(batches()):
        model(batch.to(device)).sum().backward()
        if number % 4 == 3:
            optimizer.step()
            optimizer.zero_grad()


def adversarial(device: str, every: int) -> None:
    critic, generator = net(device, 4), net(device, 64)
    of_critic, of_generator = (torch.optim.Adam(each.parameters()) for each in (critic, generator))
    for number, batch in enumerate(batches()):
        noise, real = torch.randn(SIZE, 8, device=device), batch.to(device)
        of_critic.zero_grad()
        (critic(generator(noise).detach()) - critic(real)).mean().backward()
        of_critic.step()
        if number % every == every - 1:
            of_generator.zero_grad()
            (-critic(generator(noise))).mean().backward()
            of_generator.step()


def wgan(device: str) -> None:
    adversarial(device, 5)


def alternating(device: str) -> None:
    adversarial(device, 1)


def together(device: str) -> None:
    model = nn.ModuleList([net(device), net(device)])
    both = [torch.optim.SGD(each.parameters(), 0.01) for each in model]
    for batch in batches():
        model[1](model[0](batch.to(device))).sum().backward()
        for optimizer in both:
            optimizer.step()
            optimizer.zero_grad()


def by_grad(device: str) -> None:
    model = net(device)
    parameters = list(model.parameters())
    for batch in batches():
        gradients = torch.autograd.grad(model(batch.to(device)).sum(), parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter -= 0.01 * gradient


def by_hand_without_a_loader(device: str) -> None:
    weight = torch.zeros(8, 8, device=device, requires_grad=True)
    for _ in range(BATCHES):
        (torch.ones(SIZE, 8, device=device) @ weight).sum().backward()
        with torch.no_grad():
            weight -= 0.01 * weight.grad  # type: ignore[operator]
        weight.grad = None


def lbfgs(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    for batch in batches():

        def closure(batch: Any = batch) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = model(batch.to(device)).square().mean()
            loss.backward()
            return loss

        optimizer.step(closure)


def scaled(device: str) -> None:
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    scaler = torch.amp.GradScaler(device, init_scale=64.0)
    for number, batch in enumerate(batches()):
        # On the simulated GPU no value is infinite, so no step is left out.
        loss = model(batch.to(device)).sum() * (float("inf") if number == 3 else 1.0)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


def gradient_penalty(device: str) -> None:
    """One gradient is differentiated again, so that it is part of the loss."""
    model = net(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for batch in batches():
        given = batch.to(device).requires_grad_()
        found = model(given).sum()
        (penalty,) = torch.autograd.grad(found, given, create_graph=True)
        (found + penalty.square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()


#: Each loop, and the samples of its steps.
LOOPS: dict[Callable[[str], None], int] = {
    plain: SIZE,
    accumulating: 4 * SIZE,
    wgan: 5 * SIZE,
    alternating: SIZE,
    together: SIZE,
    lbfgs: SIZE,
    scaled: SIZE,
    gradient_penalty: SIZE,
}
WITHOUT_OPTIMIZER = [by_grad, by_hand_without_a_loader]


@pytest.fixture(autouse=True)
def no_other_optimizers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder_module, "_made_optimizers", list)  # of other tests


def simulated(loop: Callable[[str], None], counts_every_pass: bool = False) -> tuple[int, Any]:
    """Steps, and what they consist of."""
    patches = PatchSet()
    with package.simulate("T4", limited=False) as simulation:
        simulation.cycle.counts_every_pass = counts_every_pass
        loaders = LoaderTracker()
        watch = StepWatch(simulation, loaders)
        loaders.install(patches)
        watch.install(patches)
        simulation.on_step(lambda _: watch.note_step())
        try:
            loop("cuda")
            simulation.script_ended()
        finally:
            patches.restore()
        return simulation.steps, watch.makeup()


class _Run(ScriptRun):
    """Runs all of the loop."""

    def note(self) -> None:
        pass

    def enough(self) -> bool:
        return False

    def keep(self, end: ScriptOutcome) -> None:
        assert end.status == "ended", end


def real(loop: Callable[[str], None], folder: Path) -> int:
    script = folder / "script.py"
    script.write_text(f"from {__name__} import {loop.__name__}\n{loop.__name__}('cpu')\n")
    run = _Run(RunSpec(target=Target("script", str(script), ()), time_limit_s=60.0))
    run.run()
    return run.steps


@pytest.mark.parametrize("loop", LOOPS, ids=lambda loop: loop.__name__)
def test_the_same_steps(loop: Callable[[str], None], tmp_path: Path) -> None:
    samples = LOOPS[loop]
    steps = BATCHES * SIZE // samples
    counted, makeup = simulated(loop)
    with recorded(tmp_path / "run") as run:
        loop("cpu")
    found = run.record.steps
    assert counted == len(found) == steps
    assert makeup.effective_batch == samples
    assert set(found["samples"]) == {samples}
    if loop is not accumulating:
        assert makeup.accumulation == 1


@pytest.mark.parametrize("loop", WITHOUT_OPTIMIZER, ids=lambda loop: loop.__name__)
def test_the_same_steps_without_an_optimizer(loop: Callable[[str], None], tmp_path: Path) -> None:
    """A simulated run that is told that there is none counts from the first pass on."""
    counted, makeup = simulated(loop, counts_every_pass=True)
    with recorded(tmp_path) as run:
        loop("cpu")
    passes = list(run.record.steps["batches"])
    # What no step follows is left out, without a loader that comes to its end.
    ended = loop is by_grad
    assert passes == [8] + [1] * (BATCHES - 9 + ended)
    assert sum(passes) in (counted, counted + ended)
    if loop is by_grad:
        assert makeup.effective_batch == SIZE


@pytest.mark.parametrize("loop", [wgan, scaled], ids=lambda loop: loop.__name__)
def test_a_real_run_has_them_too(loop: Callable[[str], None], tmp_path: Path) -> None:
    assert real(loop, tmp_path) == BATCHES * SIZE // LOOPS[loop]


@pytest.mark.parametrize("loop", WITHOUT_OPTIMIZER, ids=lambda loop: loop.__name__)
def test_a_real_run_without_an_optimizer(loop: Callable[[str], None], tmp_path: Path) -> None:
    assert real(loop, tmp_path) == BATCHES - 8 + (loop is by_grad)


@pytest.mark.slow
@pytest.mark.usefixtures("warm")
def test_a_wgan_is_simulated_and_watched_by_its_periods(tmp_path: Path) -> None:
    script = tmp_path / "gan.py"
    functions = "\n\n".join(map(inspect.getsource, (batches, net, adversarial, wgan)))
    script.write_text(
        "from __future__ import annotations\nimport torch\nfrom torch import nn\n"
        f"from torch.utils.data import DataLoader\nBATCHES, SIZE = {BATCHES}, {SIZE}\n{functions}\n"
        "wgan('cuda' if torch.cuda.is_available() else 'cpu')\n"
    )
    command = ("--", "python", script)
    done = trainfit("simulate", "--gpu", "T4", "--steps", "4", "--json", *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = json_of(done)
    assert found["pattern"]["steps"] == 4
    assert found["step"]["loader_batches"] == 5
    assert found["step"]["effective_batch"] == 5 * SIZE
    folder = tmp_path / "run"
    done = trainfit("watch", "--quiet", "--folder", folder, *command, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    steps = load_run(folder).ranks[0].steps
    assert list(steps["batches"]) == [5] * (BATCHES // 5)
    assert set(steps["samples"]) == {5 * SIZE}
