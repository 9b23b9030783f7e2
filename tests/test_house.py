"""The house: rooms of few modules, each of which says what is in it."""

from __future__ import annotations

import ast
import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "trainfit"
#: Modules of a room at most.
MOST = 20
ROOMS = sorted(init.parent for init in SOURCE.rglob("__init__.py") if init.parent != SOURCE)


def modules(room: Path) -> list[Path]:
    return [file for file in room.glob("*.py") if file.name != "__init__.py"]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(SOURCE)))
def test_a_room_has_few_modules_and_says_what_is_in_it(room: Path) -> None:
    assert len(modules(room)) <= MOST
    for file in (room / "__init__.py", *modules(room)):
        if "probes" not in file.parts:
            assert ast.get_docstring(ast.parse(file.read_text())), file


def test_every_folder_with_modules_is_a_package() -> None:
    for folder in {file.parent for file in SOURCE.rglob("*.py")} - {SOURCE / "hardware" / "probes"}:
        assert (folder / "__init__.py").is_file(), folder


def test_the_architecture_names_every_room_and_nothing_else() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"^\| `([a-z_/]+)` \|", text, flags=re.MULTILINE))
    below = {str(room.relative_to(SOURCE)) for room in ROOMS}
    inner = {room for room in below if "/" in room} - {"hardware/profiles"}
    assert named - {"hardware/probes"} == inner


def test_the_modules_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`", text))
    named |= set(re.findall(r"^ +([a-z_]+(?:/[a-z_]+)+)", text, flags=re.MULTILINE))
    assert len(named) > 60
    for name in named:
        places = (SOURCE / name, SOURCE / f"{name}.py", ROOT / name, ROOT / f"{name}.py")
        assert any(place.exists() for place in places), name


def test_the_architecture_has_the_order_of_the_packages() -> None:
    text = " ".join((ROOT / "docs" / "architecture.md").read_text().split())
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    layers = [
        [name.strip("() ") for name in layer.split("|")]
        for layer in contracts["contracts"][0]["layers"]
    ]
    named = [[each for each in layer if each != "integrations"] for layer in layers]
    assert f"`{' > '.join(', '.join(layer) for layer in named)}`" in text


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 130
