"""What a script does every so many steps is made to come within the few that are simulated."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from trainfit.scripts.phases.loops import epochs_of
from trainfit.scripts.phases.periodic import PeriodicWork, blocks_of

_LOOP = """
import weakref

class Batch:
    pass

class Trainer:
    def __init__(self, every, is_main=True, calls=()):
        self.every, self.is_main, self.calls, self.step, self.did = every, is_main, calls, 0, []

    def fit(self):
        for number in range(1, 6):
            self.optimizer_step()
            for call in self.calls:
                call(self)
            {body}

    def optimizer_step(self):
        self.step += 1
        if self.step == 2:
            work.begin()

def divisible_by(numerator, denominator):
    "Of whole numbers."
    return (numerator % denominator) == 0

def is_time(number, every=100):
    return number % every == 0

def callback(trainer):
    if trainer.step % 1000 == 0:
        for each in range(3):
            if each == 1:
                break
        trainer.did.append(("callback", trainer.step))
"""


def _did(folder: Path, body: str, **arguments: Any) -> list[Any]:
    """What a loop with this ``body`` does of its periodic work; traced as a child would be."""
    body = textwrap.indent(textwrap.dedent(body), " " * 12).strip()
    file = folder / "train.py"
    file.write_text(_LOOP.replace("{body}", body))
    work = PeriodicWork()
    space: dict[str, Any] = {"work": work}
    exec(compile(file.read_text(), str(file), "exec"), space)
    if arguments.pop("with_callback", False):
        arguments["calls"] = (space["callback"],)
    before = sys.gettrace()
    sys.settrace(None)
    try:
        trainer = space["Trainer"](**arguments)
        trainer.fit()
    finally:
        work.end()
        sys.settrace(before)
    return trainer.did  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "condition",
    [
        "self.step % self.every == 0",
        "not self.step % self.every",
        "not (number % self.every)",
        "self.is_main and number > 1 and (self.step + 1) % self.every == 0",
        "(number - 1) % self.every == self.every - 1",
        "self.is_main and self.step != 0 and divisible_by(self.step, self.every)",
        "divisible_by(denominator=self.every, numerator=number)",
    ],
)
def test_it_comes_once(tmp_path: Path, condition: str) -> None:
    body = f"if {condition}:\n    self.did.append(self.step)"
    assert _did(tmp_path, body, every=500) == [2]


@pytest.mark.parametrize("condition", ["is_time(number)", "self.divisible_by(number, 500)"])
def test_what_a_call_tests_is_not_guessed(tmp_path: Path, condition: str) -> None:
    body = f"self.divisible_by = lambda *each: False\nif {condition}:\n    self.did.append(1)"
    assert _did(tmp_path, body, every=500) == []


@pytest.mark.parametrize("condition", ["epoch == 40 and self.is_main", "epoch >= self.every"])
def test_what_comes_with_a_later_epoch_comes_once(tmp_path: Path, condition: str) -> None:
    body = f"epoch = number - 1\nif {condition}:\n    self.did.append(self.step)"
    assert _did(tmp_path, body, every=500) == [2]
    assert _did(tmp_path, body, every=500, is_main=False) == [2] * ("every" in condition)
    of_all = body.replace("epoch", "max_epoch")
    assert _did(tmp_path, of_all, every=500) == []  # how many there are does not change


_NESTED = """
def train(loader, epochs=7, first=1):
    for fold in range(2):
        for epoch in {epochs}:
            for batch in loader:
                for _ in range(3):
                    seen.append(epochs_of(sys._getframe()))
            for other in loader:
                pass

bar = lambda x: x
train([1])
"""


@pytest.mark.parametrize(
    ("epochs", "all_of_them"),
    [("range(first, epochs)", 12), ("tqdm(range(epochs), leave=False)", 14), ("count()", 2)],
)
def test_epochs_of_the_loop_over_the_data(tmp_path: Path, epochs: str, all_of_them: int) -> None:
    file = tmp_path / "train.py"
    file.write_text(_NESTED.replace("{epochs}", epochs))
    seen: list[int | None] = []
    space = {"seen": seen, "epochs_of": epochs_of, "sys": sys, "tqdm": lambda it, **_: it}
    exec(compile(file.read_text(), str(file), "exec"), space | {"count": lambda: [1]})
    assert set(seen) == {all_of_them}


_DRAWN = """
import sys

def take(batches):
    return [next(batches)]

def train(loader, epochs=3):
    {first}
    for epoch in range(epochs):
        {second}
        for step in range(len(loader)):
            for batch in take(batches):
                seen.append(epochs_of(sys._getframe()))

train([1, 2])
"""


@pytest.mark.parametrize(
    ("first", "second", "epochs"),
    [("pass", "batches = iter(loader)", 3), ("batches = iter(loader * 3)", "pass", None)],
)
def test_rounds_that_take_from_an_iterator_are_batches(
    tmp_path: Path, first: str, second: str, epochs: int | None
) -> None:
    file = tmp_path / "train.py"
    file.write_text(_DRAWN.replace("{first}", first).replace("{second}", second))
    seen: list[int | None] = []
    exec(compile(file.read_text(), str(file), "exec"), {"seen": seen, "epochs_of": epochs_of})
    assert seen == [epochs] * 6


def test_a_loop_without_an_end_has_no_epochs(tmp_path: Path) -> None:
    file = tmp_path / "train.py"
    file.write_text("while True:\n    for x in [1]:\n        seen = of(_getframe())\n    break\n")
    space = {"of": epochs_of, "_getframe": sys._getframe}
    exec(compile(file.read_text(), str(file), "exec"), space)
    assert space["seen"] is None


def test_of_a_callback(tmp_path: Path) -> None:
    assert _did(tmp_path, "pass", every=500, with_callback=True) == [("callback", 2)]


def test_on_one_line(tmp_path: Path) -> None:
    body = "if self.step % self.every == 0: self.did.append(self.step)"
    assert _did(tmp_path, body, every=500) == [2]


def test_what_follows_a_continue(tmp_path: Path) -> None:
    body = """
        if self.step % self.every != 0:
            continue
        self.did.append(self.step)
    """
    assert _did(tmp_path, body, every=500) == [2]


@pytest.mark.parametrize(
    ("condition", "every", "steps"),
    [
        ("not self.is_main and self.step % self.every == 0", 500, []),  # it never comes
        ("self.step % self.every == 0", None, []),  # nor here: an error in the script's own run
        ("self.step % self.every == 0", 2, [2, 4]),  # it comes by itself
        ("'%d' % self.step == '9'", 500, []),
    ],
)
def test_what_never_comes_does_not(
    tmp_path: Path, condition: str, every: int | None, steps: list[int]
) -> None:
    condition = condition if every else f"self.every and {condition}"
    body = f"if {condition}:\n    self.did.append(self.step)"
    assert _did(tmp_path, body, every=every) == steps


def test_what_ends_the_training_is_left(tmp_path: Path) -> None:
    body = "if self.step % self.every == 0:\n    self.did.append(self.step)\n    break"
    assert _did(tmp_path, body, every=500) == []


def test_accumulation_is_left(tmp_path: Path) -> None:
    """The optimizer's step itself is in the block: three micro-batches a step stay three."""
    file = tmp_path / "train.py"
    file.write_text(
        "for number in range(1, 13):\n"
        "    if number % 3 == 0:\n"
        "        steps.append(number)\n"
        "        if len(steps) == 2:\n"
        "            work.begin()\n"
    )
    work, steps = PeriodicWork(), list[int]()
    before = sys.gettrace()
    sys.settrace(None)
    try:
        exec(compile(file.read_text(), str(file), "exec"), {"work": work, "steps": steps})
    finally:
        work.end()
        sys.settrace(before)
    assert steps == [3, 6, 9, 12] and not work.entered


def test_a_file_that_cannot_be_read_has_none(tmp_path: Path) -> None:
    (tmp_path / "odd.py").write_text("if (")
    assert blocks_of(str(tmp_path / "odd.py")) == {} == blocks_of(str(tmp_path / "gone.py"))


def test_nothing_of_the_functions_is_kept_when_it_is_over(tmp_path: Path) -> None:
    """Before Python 3.13 a traced frame keeps what its variables held."""
    body = """
    batch = Batch()
    gone = weakref.ref(batch)
    if self.step % 500 == 0:
        self.did.append(self.step)
    work.end()
    del batch
    self.did.append(gone() is None)
    """
    did = _did(tmp_path, body, every=500)
    assert False not in did and 2 in did
