"""The line that the batch size comes from: a library's call, a configuration, a default."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers_cli import json_of, trainfit
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.command.script_lines import script_lines
from trainfit.results.changes import ScriptLine
from trainfit.results.runs.trace import CallSite

FIT = CallSite("train.py:{line}", "fit", ("data", "batch_size", "num_workers"))
INIT = CallSite("", "Trainer", ("model", "batch_size", "config"))


@pytest.mark.parametrize(
    ("text", "line", "at", "call", "written"),
    [
        ("Trainer(m).fit(data, batch_size=16)", 1, 1, "fit", "batch_size={}"),
        ("Trainer(m).fit(\n    data,\n    16,\n)", 1, 3, "fit", "batch_size={}"),
        ("t = Trainer(m, 16)\nt.fit(data)", 2, 1, "Trainer", "batch_size={}"),
        # What only looks like it: another loader, another number.
        ("val = DataLoader(d, batch_size=16)\nTrainer(m, 16).fit(data)", 2, 2, "Trainer",
         "batch_size={}"),
        ("fit(Net(16), batch_size=cfg['batch_size'])\ncfg = {'batch_size': 16}", 1, 2, "",
         '"batch_size": {}'),
        ("class C:\n    width: int = 16\n    batch_size: int = 16\nfit(d, C())", 4, 3, "",
         "batch_size: int = {}"),
        ("BS = 16\ndef main(bs=BS):\n    fit(data, bs)\nmain()", 3, 1, "", "BS = {}"),
        ("def main(batch_size=16):\n    fit(data, batch_size)\nmain()", 2, 1, "", "batch_size={}"),
        ("a = TrainingArguments('o', per_device_train_batch_size=16)\nfit(a)", 2, 1,
         "TrainingArguments",
         "per_device_train_batch_size={}"),
        ("size = 16\nfit(data, batch_size=size)", 2, 1, "", "size = {}"),
        ("DataLoader(data, 16)", 1, 1, "DataLoader", "batch_size={}"),
    ],
)  # fmt: skip
def test_the_line_of_the_batch_size(
    text: str, line: int, at: int, call: str, written: str, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    sites = (CallSite(f"train.py:{line}", FIT.called, FIT.parameters), INIT)
    found = script_lines(parse_command(["python", "train.py"]), 16, sites)
    assert found["batch_size"] == ScriptLine(f"train.py:{at}", written, call)


@pytest.mark.parametrize(
    "text",
    [
        "a = dict(batch_size=16)\nb = dict(batch_size=16)\nfit(data, a)",  # which one?
        "fit(Net(16), data)",  # no parameter of that name
        "fit(data, batch_size=32)",  # another number
        "fit(data, *sizes, batch_size=n + 16)",
        "fit(",
    ],
)
def test_no_line_is_guessed(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    sites = (CallSite(f"train.py:{text.count(chr(10)) + 1}", "fit", ("model", "data")),)
    found = script_lines(parse_command(["python", "train.py"]), 16, sites)
    assert "batch_size" not in found


@pytest.mark.parametrize(
    ("text", "lines"),
    [
        # pytorch/examples' VAE, and its MNIST.
        ("kwargs = {'num_workers': 1, 'pin_memory': True} if cuda else {}\n"
         "DataLoader(data, batch_size=8, **kwargs)",
         {"num_workers": (1, '"num_workers": {}'), "pin_memory": (1, '"pin_memory": {}')}),
        ("more = dict(num_workers=1)\nk = {'batch_size': 8}\nk.update(more)\nDataLoader(d, **k)",
         {"num_workers": (1, "num_workers={}")}),
        ("k = {}\nk['num_workers'] = 1\nDataLoader(d, **k)",
         {"num_workers": (2, "k['num_workers'] = {}")}),
        # Which one? None of its own; and what the call itself says.
        ("a = {'num_workers': 1}\nb = {'num_workers': 1}\nDataLoader(d, **a)", {}),
        ("a = {'num_workers': 1}\nDataLoader(d, 8)", {}),
        ("a = {'num_workers': 1}\nDataLoader(d, num_workers=2, **b)", {}),
    ],
)  # fmt: skip
def test_settings_that_a_dictionary_gives_the_dataloader(
    text: str, lines: dict[str, tuple[int, str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """DataLoader(…, num_workers=2) next to **kwargs with num_workers raises a TypeError."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(text)
    site = CallSite(f"train.py:{text.count(chr(10)) + 1}", "__init__", ("dataset", "num_workers"))
    found = script_lines(parse_command(["python", "train.py"]), None, (site,))
    assert found == {
        name: ScriptLine(f"train.py:{line}", written) for name, (line, written) in lines.items()
    }


LIBRARY = """
import torch
from torch.utils.data import DataLoader

def fit(model, data, batch_size=32, num_workers=0):
    model = model.cuda()
    optimizer = torch.optim.Adam(model.parameters())
    for (x,) in DataLoader(data, batch_size=batch_size, num_workers=num_workers):
        loss = model(x.cuda()).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
"""
SCRIPT = """import sys; sys.path.append("site-packages")
import torch
from site_fit import fit

data = torch.utils.data.TensorDataset(torch.rand(16000, 8))
fit(torch.nn.Linear(8, 1), data, batch_size=32)
"""


@pytest.mark.slow
def test_a_librarys_fit_is_the_line_to_change(tmp_path: Path) -> None:
    """A DataLoader(…) that is nowhere in the user's file was named."""
    library = tmp_path / "site-packages"
    library.mkdir()
    (library / "site_fit.py").write_text(LIBRARY)
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("--no-loader", "--no-remedies", "--steps=2", "--json", "--", "python", "train.py")
    done = trainfit("plan", "--gpu", "RTX 4090", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    plan = json_of(done)
    (option,) = [part for part in plan["launch_parts"] if part["status"] == "option"]
    assert (option["place"], option["call"]) == ("train.py:6", "fit")
    assert option["line"] == f"batch_size={option['value']}" and int(option["value"]) == 320
    lines = plan["script_lines"]
    workers = {"place": "train.py:6", "line": "num_workers={}", "call": "fit"}
    assert lines["num_workers"] == workers
    # What is launched is what the headline says.
    assert plan["run"]["batch_size"] == plan["now"]["recommended_batch"] == 32
