"""What a plan says of an epoch's evaluation, which no training step contains."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.helpers_cli import json_of, trainfit
from trainfit.plan.changes.amp import AmpSetting
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.epoch_end import _Evaluations, is_longer
from trainfit.plan.epoch_peak import within_evaluation
from trainfit.plan.runs.tracing import Trace
from trainfit.plan.sizing.batch_sizes import Batches
from trainfit.results.configuration import EpochEnd
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.learning import LearningFacts, Misuse
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.results.runs.steps import Coverage
from trainfit.results.runs.trace import LoaderCut, LoaderInfo, TraceOutcome

_SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
train = TensorDataset(torch.zeros(2048, 64), torch.zeros(2048, dtype=torch.long))
val = TensorDataset(torch.zeros(20_000, 64))
model = nn.Linear(64, 10_000).cuda()
opt = torch.optim.SGD(model.parameters())
for epoch in range(2):
    for x, y in DataLoader(train, batch_size=64):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        opt.step()
    {evaluation}
"""
_EVALUATION = """model.eval()
    kept = []
    with torch.no_grad():
        for (x,) in DataLoader(val, batch_size=64, num_workers={workers}):
            kept.append({kept})
    model.train()"""


def _planned(folder: Path, evaluation: str, samples: int = 20_000) -> dict[str, Any]:
    script = folder / "train.py"
    script.write_text(_SCRIPT.replace("{evaluation}", evaluation).replace("20_000", str(samples)))
    arguments = ["plan", "--no-loader", "--gpu", "GTX 1060 3GB", "--json", "--", "python"]
    found = trainfit(*arguments, script, cwd=folder)
    return json_of(found)


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("brief_with_ends")
def test_predictions_kept(tmp_path: Path, workers: int) -> None:
    """313 batches of 64 × 10,000 numbers are kept: 800 MB that no step has."""
    text = _EVALUATION.format(kept="model(x.cuda())", workers=workers)
    end = _planned(tmp_path, text)["epoch_end"]
    assert (end["evaluation"], end["batches"]) == ("simulated", 313)
    assert end["batch_bytes"] == pytest.approx(64 * 10_000 * 4, rel=0.1)
    assert end["allocated_bytes"] == pytest.approx(20_032 * 10_000 * 4, rel=0.1)
    assert end["kept_at"].endswith("train.py:18")


@pytest.mark.slow
@pytest.mark.usefixtures("brief_with_ends")
def test_too_many_kept(tmp_path: Path) -> None:
    text = _EVALUATION.format(kept="model(x.cuda()).double().repeat(1, 4)", workers=0)
    found = _planned(tmp_path, text)
    assert found["epoch_end"]["fits"] is False
    kinds = [(each["kind"], each["place"]["line"]) for each in found["findings"][:1]]
    assert kinds == [("tensors_kept", 18)]


#: After the loop, with the model in training mode all along.
_AFTER = """kept = []
    with torch.inference_mode():
        for (x,) in DataLoader(val, batch_size=64):
            kept.append(model(x.cuda()){one})
    {after}"""


@pytest.mark.slow
@pytest.mark.usefixtures("brief_with_ends")
def test_what_comes_after_the_evaluations_loop(tmp_path: Path) -> None:
    """Kept, and once more as one tensor."""
    found = _planned(tmp_path, _AFTER.format(one="", after="torch.cat(kept).sum()"))
    end = found["epoch_end"]
    assert (end["evaluation"], end["batches"]) == ("simulated", 313)
    assert end["allocated_bytes"] == pytest.approx(2 * 20_000 * 10_000 * 4, rel=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("brief_with_ends")
def test_a_matrix_of_all_pairs_is_named(tmp_path: Path) -> None:
    """Each sample with each other, which grows with the square of the evaluation's length: two of
    1.6 GB, of a card of 3 GB; what is kept of each batch has 1.3 MB."""
    after = "all = torch.cat(kept); (all @ all.T).exp()"
    found = _planned(tmp_path, _AFTER.format(one="[:, :16].clone()", after=after))
    assert found["epoch_end"]["fits"] is False
    (cause,) = [each for each in found["findings"] if each["kind"] == "all_pairs"]
    assert (cause["place"]["line"], cause["share"] > 0.95) == (18, True)
    assert cause["evidence"][0]["value"] == pytest.approx(2 * 20_000**2 * 4, rel=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("brief_with_ends")
def test_nothing_kept(tmp_path: Path) -> None:
    end = _planned(tmp_path, _EVALUATION.format(kept="model(x.cuda()).cpu()", workers=0))[
        "epoch_end"
    ]
    assert (end["evaluation"], end["batch_bytes"], end["fits"]) == ("simulated", 0, True)


@pytest.mark.parametrize(
    ("evaluated", "loader", "batches", "longer"),
    [
        (False, 0, 313, False),  # another DataLoader of the script
        (True, 0, 8, False),
        (True, 0, 9, True),
        (True, 0, None, True),  # of no length, as far as is known
        (True, None, None, False),  # by hand
        (True, None, 9, True),
    ],
)
def test_a_second_length_only_of_what_the_first_cut_short(
    evaluated: bool, loader: int | None, batches: int | None, longer: bool
) -> None:
    coverage = Coverage(evaluated, saved=False, evaluation_batches=batches)
    assert is_longer(coverage, LoaderCut(loader, batches=2, others=8)) is longer
    assert not is_longer(None, LoaderCut(loader, batches=2, others=8))


_COUNTED = """model.eval()
    seen = 0
    with torch.no_grad():
        for (x,) in DataLoader(val, batch_size=64):
            seen += len(model(x.cuda()))
    model.train()
    assert seen == len(val), "some are missing\""""


@pytest.mark.usefixtures("brief_with_ends")
def test_an_evaluation_that_counts_its_samples_is_whole(tmp_path: Path) -> None:
    """As torchvision's references do: cut short, it fails, which the script itself does not."""
    found = _planned(tmp_path, _COUNTED, 2000)
    end = found["epoch_end"]
    assert (end["evaluation"], end["batches"], end["batch_bytes"]) == ("simulated", 32, 0)
    assert end["fits"] and not end["unseen"] and not found["findings"]


#: Each sample of a batch is compared with a gallery: 20 MB a sample, of which training has none.
_COMPARED = """model.eval()
    with torch.no_grad():
        for (x,) in DataLoader(val, batch_size=64 if FIXED else a.batch_size):
            (model(x.cuda())[:, None] - gallery[None]).square().sum(-1)
    model.train()"""
_OPTION = """
import argparse
import torch
p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=8)
a = p.parse_args()
FIXED = {fixed}
gallery = torch.zeros(512, 10_000).cuda()
"""


def _compared(folder: Path, *, fixed: bool = False, arguments: tuple[str, ...] = ()) -> Any:
    text = _OPTION.replace("{fixed}", str(fixed)) + _SCRIPT.replace("2048, 64", "20_000, 64")
    text = text.replace("zeros(2048,", "zeros(20_000,").replace(
        "zeros(20_000, 64))", "zeros(640, 64))"
    )
    text = text.replace("train, batch_size=64", "train, batch_size=a.batch_size")
    script = folder / "train.py"
    script.write_text(text.replace("{evaluation}", _COMPARED))
    command = ["plan", "--no-loader", "--gpu", "GTX 1060 3GB", "--json", "--", "python"]
    return json_of(trainfit(*command, script, *arguments, cwd=folder))


@pytest.mark.slow
@pytest.mark.usefixtures("brief_with_ends")
def test_the_evaluation_limits_the_recommended_batch_size(tmp_path: Path) -> None:
    found = _compared(tmp_path, arguments=("--batch-size={batch_size:8}",))
    best, limits = found["now"]["recommended_batch"], found["now"]["limits"]
    assert found["epoch_end"]["fits"] and found["epoch_end"]["batch_size"] == 8
    there = found["recommended_epoch_end"]
    assert (there["batch_size"], there["fits"], there["evaluation"]) == (best, True, "simulated")
    # Two of 20 MB for each sample of a batch, in 3 GB.
    assert 8 < best <= limits["evaluation"] == found["now"]["largest_batch"] < 100
    assert limits["reason"] == f"the evaluation fits up to {limits['evaluation']}"
    assert f"--batch-size={best}" in found["launch"]


@pytest.mark.slow
@pytest.mark.usefixtures("brief_with_ends")
def test_a_smaller_batch_size_where_the_evaluation_does_not_fit(tmp_path: Path) -> None:
    found = _compared(tmp_path, arguments=("--batch-size", "512"))
    assert found["epoch_end"]["fits"] is False and found["recommended_epoch_end"]["fits"]
    assert found["now"]["recommended_batch"] < 100
    assert f"--batch-size {found['now']['recommended_batch']}" in found["launch"]


@pytest.mark.slow
@pytest.mark.usefixtures("brief_with_ends")
def test_an_evaluation_with_a_batch_size_of_its_own(tmp_path: Path) -> None:
    """It needs 2.6 GB whatever the training's batch size is."""
    found = _compared(tmp_path, fixed=True)
    assert found["epoch_end"]["device_bytes"] > 2.5e9
    assert found["now"]["largest_batch"] > 1000
    assert "evaluation" not in found["now"]["limits"]["reason"]


_OF_SIZES = """model.eval()
    with torch.no_grad():
        rows = [torch.zeros(1 + 2000 * (i == 99), 64) for i in range(100)]
        for x in DataLoader(rows, batch_size=1):
            kept = model(x.cuda())
    model.train()"""


@pytest.mark.slow
@pytest.mark.usefixtures("brief_with_ends")
def test_the_largest_sample_of_the_evaluation(tmp_path: Path) -> None:
    """Sixteen of a hundred are run, and the last of all has 2,001 rows."""
    end = _planned(tmp_path, _OF_SIZES)["epoch_end"]
    assert (end["batches"], end["batch_bytes"]) == (100, 0)
    assert end["allocated_bytes"] > 2001 * 10_000 * 4


_COPY = """import copy
    best = copy.deepcopy(model)
    torch.save(best.state_dict(), "best.pt")"""


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", ["", pytest.param(_EVALUATION, marks=pytest.mark.slow)])
@pytest.mark.usefixtures("brief_with_ends")
def test_a_copy_of_the_model_is_there_in_the_next_epoch(tmp_path: Path, evaluation: str) -> None:
    """2.6 MB of parameters; a script without an evaluation has it, too."""
    text = evaluation.format(kept="model(x.cuda()).cpu()", workers=0)
    found = _planned(tmp_path, f"{text}\n    {_COPY}" if text else _COPY)
    end, training = found["epoch_end"], found["now"]["memory"]["allocated_bytes"]
    assert (end["evaluation"], end["saved"]) == ("simulated" if text else "none", True)
    assert end["allocated_bytes"] >= training + 64 * 10_000 * 4


#: An evaluation every thousand steps, of a trainer whose sampler draws without an end.
_EVERY = """
import argparse
import torch
from torch import nn
from torch.utils.data import DataLoader, RandomSampler, TensorDataset
p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=64)
a = p.parse_args()
train = TensorDataset(torch.zeros(9500, 64), torch.zeros(9500, dtype=torch.long))
val = TensorDataset(torch.zeros(20_000, 64))
model = nn.Linear(64, 10_000).cuda()
opt = torch.optim.SGD(model.parameters())

def evaluate():
    model.eval()
    kept = []
    with torch.no_grad():
        for (x,) in DataLoader(val, batch_size=64):
            kept.append(model(x.cuda()).double())
    model.train()
    return torch.cat(kept)

{loop}
    opt.zero_grad()
    nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
    opt.step()
    if step > 0 and step % 1000 == 0:
        evaluate()
"""
_ENDLESS = """sampler = RandomSampler(train, replacement=True, num_samples=int(1e10))
for step, (x, y) in enumerate(DataLoader(train, a.batch_size, sampler=sampler), start=1):"""
_BY_HAND = """for step in range(100_000):
    x, y = train[torch.randint(len(train), (a.batch_size,))]"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "loop",
    [pytest.param(_ENDLESS, id="sampler"),
     pytest.param(_BY_HAND, id="no loader")],
)  # fmt: skip
@pytest.mark.usefixtures("brief_with_ends")
def test_an_evaluation_every_so_many_steps(tmp_path: Path, loop: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(_EVERY.replace("{loop}", loop))
    found = json_of(
        trainfit(
            *("plan", "--no-loader", "--gpu", "GTX 1060 3GB", "--json", "--", "python"),
            *(script, "--batch-size={batch_size:64}"),
            cwd=tmp_path,
        )
    )
    end = found["epoch_end"]
    assert (end["evaluation"], end["fits"]) == ("simulated", False)
    assert end["allocated_bytes"] == pytest.approx(2 * 20_000 * 10_000 * 8, rel=0.1)


@pytest.mark.usefixtures("brief")
def test_an_endless_sampler_has_the_data_sets_epoch(tmp_path: Path) -> None:
    """No batch of thousands of samples, of which the data set has 9,500."""
    script = tmp_path / "train.py"
    text = _EVERY.replace("{loop}", _ENDLESS).replace("        evaluate()", "        pass")
    script.write_text(text)
    found = json_of(
        trainfit(
            *("plan", "--no-loader", "--gpu", "RTX 4090", "--json", "--", "python"),
            *(script, "--batch-size={batch_size:64}"),
            cwd=tmp_path,
        )
    )
    assert found["samples"] == 9500
    assert found["now"]["recommended_batch"] <= 9500 / 50


_FAILS = """
import torch
model = torch.nn.Linear(64, 10).cuda()
opt = torch.optim.SGD(model.parameters())
for step in range(40):
    loss = model(torch.randn(64, 64, device="cuda")).square().mean()
    loss.backward()
    opt.step()
    if step == 30:
        print(loss.detach().numpy())
"""


@pytest.mark.usefixtures("brief_with_ends")
def test_an_error_of_a_later_step_is_one_of_the_script(tmp_path: Path) -> None:
    """What a look for an evaluation comes upon, and whose cause is known."""
    script = tmp_path / "train.py"
    script.write_text(_FAILS)
    arguments = ["plan", "--no-loader", "--gpu", "T4", "--json", "--", "python"]
    found = json_of(trainfit(*arguments, script, cwd=tmp_path))
    kinds = {each["kind"]: each for each in found["findings"]}
    assert kinds["fails_later"]["subject"] == "after 31 steps"
    assert kinds["gpu_to_numpy"]["place"]["line"] == 10


#: Evaluated after all epochs alone; a later epoch has wider batches.
_FINAL = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
train = TensorDataset(torch.zeros(2048, 64), torch.zeros(2048, dtype=torch.long))
test = TensorDataset(torch.zeros(20_000, 64))
model = nn.Linear(64, 10_000).cuda()
opt = torch.optim.SGD(model.parameters())
for epoch in range(40):
    times = {times}
    for x, y in DataLoader(train, batch_size=64):
        opt.zero_grad()
        x, y = x.repeat(times, 1), y.repeat(times)
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        opt.step()
{after}
"""
_TESTED = """kept = []
with torch.no_grad():
    for (x,) in DataLoader(test, batch_size=64):
        kept.append(model(x.cuda()))"""
_MISSING = """model.load_state_dict(torch.load("best.pt"))
model(torch.zeros(4, 64).cuda())"""


def _at_the_end(folder: Path, times: str, after: str, *options: str) -> Any:
    script = folder / "train.py"
    script.write_text(_FINAL.replace("{times}", times).replace("{after}", after))
    gpu = "GTX 1060 3GB"
    return trainfit("plan", "--no-loader", "--gpu", gpu, *options, "--", "python", script,
                    cwd=folder)  # fmt: skip


@pytest.mark.slow
@pytest.mark.usefixtures("brief_with_ends")
def test_what_follows_the_last_epoch(tmp_path: Path) -> None:
    """Seen in a run whose epochs are left; 800 MB are kept over all of the test's batches."""
    found = json_of(_at_the_end(tmp_path, "1", _TESTED, "--json"))
    end = found["epoch_end"]
    assert (end["batches"], end["later"]) == (313, None)
    assert end["allocated_bytes"] == pytest.approx(20_032 * 10_000 * 4, rel=0.1)
    assert end["final"].endswith("train.py:19")


@pytest.mark.slow
def test_what_goes_by_the_epochs_number(tmp_path: Path) -> None:
    end = json_of(_at_the_end(tmp_path, "1 if epoch < 30 else 8", "", "--json"))["epoch_end"]
    assert end["later"].endswith("train.py:9")
    assert end["allocated_bytes"] >= 8 * 64 * 10_000 * 4 * 2


@pytest.mark.slow
def test_what_was_not_seen_of_the_end_stands_in_the_headline(tmp_path: Path) -> None:
    said = " ".join(_at_the_end(tmp_path, "1", _MISSING).stdout.split())
    assert "what follows the last epoch (train.py:16) not simulated: " in said.partition(".py ")[0]


@pytest.mark.parametrize(("index", "runs"), [(None, 1), (0, 2)])
def test_an_end_that_nobody_tells_of_is_waited_for_once(index: int | None, runs: int) -> None:
    """Without what comes every so many steps it would not come sooner; of a DataLoader's it may."""
    asked: list[RunSpec] = []

    def attempt(_: int | None, spec: RunSpec) -> Any:
        asked.append(spec)
        return SimpleNamespace(outcome=TraceOutcome("timeout"), recording=None)

    job: Any = SimpleNamespace(runs=SimpleNamespace(attempt=attempt))
    _Evaluations(job)._runs(8, AS_WRITTEN, LoaderCut(index, 2, 8, periodic=2), (8, 16))
    assert len(asked) == runs


def test_a_cause_that_an_epochs_length_has_no_part_in_is_told_once(tmp_path: Path) -> None:
    """Neither a whole evaluation nor a whole epoch is asked for: it would fail there, too."""
    script = tmp_path / "train.py"
    script.write_text("")
    said = "RuntimeError: No available kernel. Aborting execution."
    coverage = Coverage(evaluated=True, saved=False, evaluation_batches=300)
    failed = TraceOutcome("failed", 2, 1.0, message=said, coverage=coverage)
    asked: list[RunSpec] = []

    def attempt(_: int | None, spec: RunSpec) -> Any:
        asked.append(spec)
        return Trace(failed, None, "")

    first = Trace(
        dataclasses.replace(
            failed,
            status="finished",
            loader=LoaderInfo(0, 8, 64, 2, LoaderSettings(0), "list", None),
        ),
        object(),
        "",
    )
    job: Any = SimpleNamespace(
        runs=SimpleNamespace(attempt=attempt), sized=lambda spec: spec, first=first, batch=8,
        command=parse_command(["python", str(script)]), recording=SimpleNamespace(makeup=None),
    )  # fmt: skip
    end, findings = _Evaluations(job)._of_epoch(8, AS_WRITTEN, (8, 16))
    assert [each.kind for each in findings] == ["no_attention_kernel", "fails_later"]
    assert (end.evaluation, findings[1].subject) == (
        "not simulated",
        "between steps or at an epoch's end",
    )
    assert all(spec.cut is not None and spec.cut.others == 8 for spec in asked)


def test_what_spoils_the_learning_from_a_later_epoch_on_is_told_once() -> None:
    """Of what is no less true of epochs that are cut short, and the first steps do not show."""
    own = Misuse("own_state", ("Net",), "/home/me/train.py:20")
    first = LearningFacts(3, same_order="/home/me/train.py:5")
    later = LearningFacts(
        6,
        same_order="/home/me/train.py:5",
        evaluating_at="/home/me/train.py:12",
        misuses=(own, Misuse("clips_nothing", (), "/home/me/train.py:9")),
    )
    job: Any = SimpleNamespace(
        first=SimpleNamespace(outcome=TraceOutcome("finished", learning=first))
    )
    evaluations = _Evaluations(job)
    assert not evaluations.learned()
    evaluations._learning += [later, later]
    told = {each.kind: each.place.line for each in evaluations.learned() if each.place is not None}
    assert told == {"evaluation_mode": 12, "own_state": 20}


_SPOILT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
train = TensorDataset(torch.zeros(256, 8), torch.zeros(256, dtype=torch.long))
model = nn.Sequential(nn.Dropout(0.5), nn.Linear(8, 4)).cuda()
opt = torch.optim.SGD(model.parameters())
for epoch in range(9):
    for x, y in DataLoader(train, batch_size=8):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x.cuda()), y.cuda()).backward()
        opt.step()
    {spoils}
    with torch.no_grad():
        model(x.cuda())
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("spoils", "kinds"),
    [
        ("model.eval()", ["evaluation_mode"]),
        ("model.requires_grad_(False)", ["no_graph", "fails_later"]),
        ("pass", []),
    ],
)
@pytest.mark.usefixtures("brief_with_ends")
def test_what_an_epoch_does_to_the_next(tmp_path: Path, spoils: str, kinds: list[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(_SPOILT.replace("{spoils}", spoils))
    words = "plan", "--no-loader", "--gpu", "T4", "--json", "--", "python", script
    found = json_of(trainfit(*words, cwd=tmp_path))
    assert [each["kind"] for each in found["findings"]] == kinds


_WITH_GRAPH = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
train, val = TensorDataset(torch.zeros(2048, 64)), TensorDataset(torch.zeros(8192, 64))
model = nn.Sequential(nn.Linear(64, 2048), *(nn.Sequential(nn.Linear(2048, 2048), nn.GELU())
                                             for _ in range(6)), nn.Linear(2048, 1)).cuda()
opt = torch.optim.SGD(model.parameters())
for epoch in range(2):
    model.train()
    for (x,) in DataLoader(train, batch_size=64):
        opt.zero_grad()
        model(x.cuda()).mean().backward()
        opt.step()
    model.eval()
    for (x,) in DataLoader(val, batch_size=64 * 64):
        score = model(x.cuda()).mean().item()
"""


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["model.eval()", "pass"])
@pytest.mark.usefixtures("brief_with_ends")
def test_what_an_evaluation_needs_without_its_graph(tmp_path: Path, mode: str) -> None:
    """It fits as it is, but for one line: the batch size alone was said to help."""
    script = tmp_path / "train.py"
    assert "model.eval()" in _WITH_GRAPH
    script.write_text(_WITH_GRAPH.replace("model.eval()", mode))
    words = ["plan", "--no-loader", "--gpu", "custom:700MiB", "--json", "--", "python", script]
    end = json_of(trainfit(*words, cwd=tmp_path))["epoch_end"]
    assert end["fits"] is False
    # Of 13 results of 32 MiB that it keeps, two are left.
    assert end["without_graph_bytes"] < 0.7 * end["device_bytes"]


def test_only_an_evaluation_of_an_epochs_end_is_tried_without_its_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[RunSpec] = []

    def simulated(
        _: object, batch: int, spec: RunSpec, lengths: object
    ) -> tuple[EpochEnd, tuple[()]]:
        asked.append(spec)
        return EpochEnd("simulated", device_bytes=5, fits=True, batch_size=batch), ()

    monkeypatch.setattr(_Evaluations, "_of_epoch", simulated)
    seen = _Evaluations(SimpleNamespace())  # type: ignore[arg-type]
    unfit = EpochEnd("simulated", device_bytes=9, fits=False, batch_size=8)
    assert seen.without_graph(unfit).without_graph_bytes == 5
    assert [each.name for each in asked[0].interventions] == ["no-grad-eval"]
    # Of one without eval() that changes nothing: then at the line that calls the model.
    asked.clear()
    graph = SimpleNamespace(coverage=Coverage(True, False, graph_at="train.py:7"))
    seen.looked = AS_WRITTEN, SimpleNamespace(outcome=graph)  # type: ignore[assignment]
    same = dataclasses.replace(unfit, device_bytes=5)
    assert seen.without_graph(same).without_graph_bytes == 5
    assert [each.interventions[0].targets for each in asked] == [(), ("train.py:7",)]
    asked.clear()
    assert seen.without_graph(unfit).without_graph_bytes == 5 and len(asked) == 1
    last = dataclasses.replace(unfit, final="train.py:9")
    assert seen.without_graph(last) == last and len(asked) == 1


def test_no_batch_size_is_recommended_of_an_evaluation_that_was_not_seen_to_fit() -> None:
    """An interrupted plan said "does not fit … recommended 64"."""
    peak: Any = SimpleNamespace(peak_reserved=5)
    batches = Batches("two traces", "", largest=170, recommended=64, recommended_peak=peak)
    made: list[Batches] = []
    memory_model = SimpleNamespace(context_bytes=0, usable_bytes=7, capacity_bytes=8)
    job: Any = SimpleNamespace(
        memory_model=memory_model, configuration=lambda _, batches, __: made.append(batches)
    )
    chosen: Any = AmpSetting(None, AS_WRITTEN, SimpleNamespace(), SimpleNamespace(), batches)  # type: ignore[arg-type]
    unfit = EpochEnd("simulated", device_bytes=9, fits=False, batch_size=64)
    unseen = EpochEnd("not simulated", "interrupted", batch_size=32)
    within_evaluation(job, chosen, unfit, None, lambda size, spec: unseen)
    (found,) = made
    assert (found.largest, found.recommended, found.recommended_peak) == (None, None, None)


@pytest.mark.parametrize(("largest", "asked"), [(60, 0), (640, 1)])
def test_an_evaluation_that_is_sure_to_fit_needs_no_other_batch_size(
    largest: int, asked: int
) -> None:
    """It needs a little more than the training, and both fit many times."""
    peak: Any = SimpleNamespace(peak_reserved=100)
    batches = Batches("one trace", "", largest=largest, recommended=32, recommended_peak=peak)
    memory_model = SimpleNamespace(context_bytes=0, usable_bytes=2000, capacity_bytes=2400)
    job: Any = SimpleNamespace(
        memory_model=memory_model, configuration=lambda _, __, ___: SimpleNamespace()
    )
    chosen: Any = AmpSetting(None, AS_WRITTEN, SimpleNamespace(), SimpleNamespace(), batches)  # type: ignore[arg-type]
    seen: list[int] = []

    def evaluated(size: int, spec: RunSpec) -> EpochEnd:
        seen.append(size)
        return EpochEnd("simulated", device_bytes=60, fits=True, batch_size=size)

    end = EpochEnd("simulated", device_bytes=120, fits=True, batch_size=32)
    found, _ = within_evaluation(job, chosen, end, None, evaluated)
    assert len(seen) == asked and found.batches.recommended == 32


@pytest.mark.parametrize("seconds", [10.0, 100.0])
def test_several_epochs_are_simulated_while_another_run_goes_on(seconds: float) -> None:
    """Each is asked for after the other: one of two cores was idle meanwhile."""
    order: list[tuple[str, str]] = []
    coverage = Coverage(True, saved=False, evaluation_batches=99)
    seen = SimpleNamespace(
        outcome=TraceOutcome("finished", seconds=seconds, coverage=coverage), recording=object()
    )

    def attempt(_: int | None, spec: RunSpec) -> Any:
        order.append(("asked", spec.title))
        return seen

    runs = SimpleNamespace(
        attempt=attempt, start=lambda _, spec: order.append(("begun", spec.title))
    )
    job: Any = SimpleNamespace(runs=runs, pattern=SimpleNamespace(course="settled"))
    _Evaluations(job)._runs(8, AS_WRITTEN, LoaderCut(0, 2, 8, periodic=2), (8, 16))
    several = [("begun", "several epochs")] if seconds < 60 else []
    longer = "the end of its epoch (16 batches)"
    assert order[1:] == [("begun", longer), *several, ("asked", longer)]
