"""Of several loaders in a training loop, the one that ends the epoch."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader

from trainfit.scripts.phases.loops import ends_epoch

_SHORT, _LONG = DataLoader(range(4)), DataLoader(range(9))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("over", "taken", "loader"),
    [
        ("zip(long, short)", "", _SHORT),
        ("enumerate(zip(itertools.cycle(short), long), 1)", "", _LONG),
        ("tqdm(zip(short, long), leave=False)", "", _SHORT),
        ("itertools.zip_longest(short, long)", "", _LONG),
        ("long", "next(iter(short))", _LONG),
        ("range(2)", "next(iter(short))", None),
        ("enumerate([1, 2])", "", None),
    ],
)
def test_the_loader_that_ends_the_loop(
    tmp_path: Path, over: str, taken: str, loader: DataLoader[Any] | None
) -> None:
    file = tmp_path / "train.py"
    file.write_text(f"for _ in {over}:\n    {taken}\n    seen.append(of(_getframe()))\n")
    seen: list[Any] = []
    space = {"of": ends_epoch, "_getframe": sys._getframe, "seen": seen, "itertools": itertools}
    names = {"long": _LONG, "short": _SHORT, "tqdm": lambda over, **_: over}
    exec(compile(file.read_text(), str(file), "exec"), space | names)
    assert seen[0] is loader


@pytest.mark.parametrize(("mode", "loader"), [("min_size", _SHORT), ("max_size_cycle", _LONG)])
def test_of_loaders_that_a_trainer_combines(mode: str, loader: DataLoader[Any]) -> None:
    class Combined:
        flattened, _mode = [_SHORT, _LONG], mode

    assert ends_epoch(None, Combined()) is loader
