"""A script comes past its last epoch within a few steps: its loops end, the last round first."""

from __future__ import annotations

import sys
import textwrap
import threading
from pathlib import Path
from typing import Any

import pytest

from trainfit.scripts.phases.last_epoch import LastEpoch
from trainfit.scripts.phases.loops import Course, course_of


def _ran(folder: Path, text: str, *, by_number: bool = True, end: int = 2) -> list[Any]:
    """What a script notes whose loops end after every ``end`` of its steps; traced as a child."""
    file = folder / "train.py"
    file.write_text(textwrap.dedent(text))
    last, did = LastEpoch(), list[Any]()

    def step() -> None:
        did.append("step")
        if did.count("step") % end == 0:
            last.begin(by_number=by_number)
        assert did.count("step") < 50

    space = {"step": step, "did": did, "tqdm": lambda over, **_: over, "__name__": "__main__"}
    before = sys.gettrace()
    sys.settrace(None)
    try:
        exec(compile(file.read_text(), str(file), "exec"), space)
    finally:
        last.end()
        sys.settrace(before)
    assert "range" not in space  # it was put back
    return [each for each in did if each != "step"]


_EPOCHS = """
import contextlib
def main(epochs=40):
    number = epochs
    for epoch in {over}:
        for batch in range(1000):
            step()
        did.append(("evaluated", epoch))
    {after}
main()
did.append("tested")
"""


@pytest.mark.parametrize("over", ["range(epochs)", "tqdm(range(epochs), leave=False)"])
@pytest.mark.parametrize(
    "after", ["did.append('after')", "", "with contextlib.nullcontext(): did.append('after')"]
)
def test_the_last_epoch_and_what_follows_it(tmp_path: Path, over: str, after: str) -> None:
    """The first epoch, the last one, and the end, also where a function ends with the loop."""
    text = _EPOCHS.replace("{over}", over).replace("{after}", after)
    rest = ["after"] * bool(after) + ["tested"]
    assert _ran(tmp_path, text) == [("evaluated", 0), ("evaluated", 39), *rest]
    assert _ran(tmp_path, text, by_number=False) == [("evaluated", 0), *rest]


@pytest.mark.parametrize("before", ["model = 1", "", "models = [each for each in 'ab']"])
def test_an_evaluation_within_a_context(before: str, tmp_path: Path) -> None:
    """CPython has the line of a ``with`` twice, once where it ends; see ``loops._jumps``."""
    text = f"""
    import contextlib
    batches = range(3)
    for epoch in range(40):
        {before}
        for batch in batches:
            step()
        with contextlib.nullcontext():
            did.append(("evaluated", epoch))
    with contextlib.nullcontext("context") as given:
        did.append(given)
    """
    assert _ran(tmp_path, text) == [("evaluated", 0), ("evaluated", 39), "context"]


def test_of_one_loop(tmp_path: Path) -> None:
    text = """
    for number in range(5000):
        step()
        if number == 4999:
            did.append("last")
    did.append("tested")
    """
    assert _ran(tmp_path, text) == ["last", "tested"]


def test_stages_of_a_list(tmp_path: Path) -> None:
    text = """
    STAGES = [(64, 5), (128, 5), (256, 9)]
    for size, epochs in STAGES:
        for epoch in range(epochs):
            for batch in range(1000):
                step()
        did.append((size, epochs))
    did.append("tested")
    """
    assert _ran(tmp_path, text) == [(64, 5), (256, 9), "tested"]


def test_a_while_loop(tmp_path: Path) -> None:
    text = """
    done = 0
    while done < 10**6:
        step()
        done += 1
    did.append("tested")
    """
    assert _ran(tmp_path, text) == ["tested"]


@pytest.mark.parametrize("number", ["epoch", "self.epoch"])
def test_a_while_loop_that_counts(tmp_path: Path, number: str) -> None:
    """It ends by its number, also where a function ends with it."""
    text = f"""
    from types import SimpleNamespace
    def train(epochs):
        self = SimpleNamespace()
        {number} = 0
        while {number} < epochs:
            for batch in range(1000):
                step()
            did.append({number})
            {number} += 1
    train(300)
    did.append("tested")
    """
    assert _ran(tmp_path, text) == [0, 299, "tested"]


def test_what_is_gone_over_is_left_alone(tmp_path: Path) -> None:
    """No loader is asked for its batches to know the last of them."""
    text = """
    class Loader:
        def __iter__(self):
            did.append("asked")
            return iter(range(1000))
    loader = Loader()
    for epoch in range(9):
        for number, batch in enumerate(loader):
            step()
    did.append("tested")
    """
    assert _ran(tmp_path, text) == ["asked", "asked", "tested"]


_COURSE = """
def train(loader, epochs):
    for epoch in range(epochs):
        {use}
        for batch in loader:
            seen.append(of(_getframe()))

train([1], 9)
print("over", len(seen))
{after}
"""


def _course(folder: Path, use: str, after: str) -> Course:
    file = folder / "train.py"
    file.write_text(_COURSE.replace("{use}", use).replace("{after}", after))
    seen: list[Course] = []
    space = {"of": course_of, "_getframe": sys._getframe, "seen": seen, "test": lambda *_: 0}
    # In a thread no test stands around the script, after which more would come.
    code = compile(file.read_text(), str(file), "exec")
    thread = threading.Thread(target=exec, args=(code, space))
    thread.start()
    thread.join()
    return seen[0]


@pytest.mark.parametrize(
    ("use", "after", "told"),
    [
        ("print(f'{epoch} of 9')", "", (None, None)),
        ("size = 64 if epoch < 5 else 128", "", (None, 4)),
        ("size = [64, 128][epoch > 5]", "", (None, 4)),
        ("best = epoch, [1, 2], {'loss': 3}", "", (None, None)),
        ("best = epoch, test(epoch)", "", (None, 4)),
        ("state = {'epoch': epoch, 'loss': 3}; test(state)", "", (None, None)),
        ("state = dict(epoch=epoch, loss=3)", "", (None, None)),
        ("best = epoch + 1; state = {'epoch': best}", "", (None, None)),
        ("at = epoch + 1; size = 64 if at < 5 else 128", "", (None, 4)),
        ("size = 64 * epoch", "", (None, 4)),
        ("state = {'epoch': epoch, 'loss': test(epoch)}", "", (None, 4)),
        ("state = {'size': 64 if epoch < 5 else 128}", "", (None, 4)),
        ("lr_scheduler = seen; seen and lr_scheduler.step(epoch + 1)", "", (None, None)),
        ("seen and seen.step(epoch)", "", (None, 4)),
        ("scheduler = seen\n        if epoch >= 10 and seen: scheduler.step()", "", (None, None)),
        ("pass\n        if epoch >= 10: print(epoch)\n        else: test()", "", (None, 5)),
        ("pass\n        if epoch == 8: seen.save()", "", (None, 5)),
        ("at = epoch; size = 64 if at < 5 else 128", "", (None, 4)),
        ("test(seen[3 * epoch : 3 * (epoch + 1)])", "", (None, None)),
        ("test() if seen else 0\n        if epoch % 3 == 0: test()", "", (None, None)),
        ("pass\n        if not epoch % 3 or epoch == 8: test()", "", (None, None)),
        ("pass\n        if epoch % 3 == 0: test(epoch)", "", (None, 5)),
        ("pass\n        if epoch % 3 == 1: test()", "", (None, 5)),
        ("pass\n        if (epoch + 1) % 3 == 0: test()", "", (None, 5)),
        ("plot_losses(seen, epoch) if seen else 0", "", (None, None)),
        ("print(epoch)", "test()", (10, None)),
        ("print(epoch)", "def late(): test()", (None, None)),
    ],
)
def test_what_is_to_come(
    tmp_path: Path, use: str, after: str, told: tuple[int | None, int | None]
) -> None:
    course = _course(tmp_path, use, after)
    lines = [each and int(each.rpartition(":")[2]) for each in (course.after, course.by_number)]
    assert tuple(lines) == told
