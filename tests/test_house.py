"""The house: rooms of few modules, each of which says what is in it."""

from __future__ import annotations

import ast
import re
import tomllib
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "src" / "trainfit"
#: Modules of a room at most.
MOST = 20
#: How a module begins: parsing all of them takes seconds.
DOCSTRING = re.compile(r'(?:#.*\n|\s)*r?"""\s*[^\s"]')
ROOMS = sorted(init.parent for init in SOURCE.rglob("__init__.py") if init.parent != SOURCE)


def modules(room: Path) -> list[Path]:
    return [file for file in room.glob("*.py") if file.name != "__init__.py"]


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: str(room.relative_to(SOURCE)))
def test_a_room_has_few_modules_and_says_what_is_in_it(room: Path) -> None:
    assert len(modules(room)) <= MOST
    for file in (room / "__init__.py", *modules(room)):
        if "probes" not in file.parts:
            assert DOCSTRING.match(file.read_text()), file


def test_every_folder_with_modules_is_a_package() -> None:
    for folder in {file.parent for file in SOURCE.rglob("*.py")} - {SOURCE / "hardware" / "probes"}:
        assert (folder / "__init__.py").is_file(), folder


def test_the_architecture_names_every_room_and_nothing_else() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"^\| `([a-z_/]+)` \|", text, flags=re.MULTILINE))
    below = {str(room.relative_to(SOURCE)) for room in ROOMS}
    inner = {room for room in below if "/" in room}
    assert named - {"hardware/probes"} == inner


def test_the_modules_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    named = set(re.findall(r"`([a-z_]+(?:/[a-z_]+)+)`", text))
    named |= set(re.findall(r"(?:^|│) +([a-z_]+(?:/[a-z_]+)+)", text, flags=re.MULTILINE))
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


#: Folders of bench with scripts as users write them.
USERS_SCRIPTS = {
    *("case_scripts", "live_scripts", "launch_scripts", "rank_scripts", "seed_scripts"),
}
CLASS = re.compile(r"^class (\w+)", re.MULTILINE)


def test_no_two_classes_have_one_name() -> None:
    """Private ones too; not those within a class or a function."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for file in (*SOURCE.rglob("*.py"), *(ROOT / "bench").rglob("*.py")):
        if not USERS_SCRIPTS & set(file.parts):
            for name in CLASS.findall(file.read_text()):
                places[name].append(str(file.relative_to(ROOT)))
    assert len(places) > 1000
    twice = {name: files for name, files in places.items() if len(files) > 1}
    assert not twice


#: Types that say of a named thing why it is so; what is wrong, because, and what to do is a
#: `results.findings.Finding`.
REASONED = {
    *("Finding", "Unknown", "SettingReason", "VariableAdvice", "LaunchPart", "Remedy"),
    *("AdviceVerification", "OptimizerUse", "Applicability", "LeftOption", "LoaderChange", "Hang"),
}
#: Calls that take a sentence of a result apart again (the data is to have the part).
TAKEN_APART = 16


#: Fields of a class that says why something is so.
WHY = ("reason", "cause", "why", "meaning", "summary")
#: A file without such a line has no such class.
SAYS_WHY = re.compile(rf"^ +({'|'.join(WHY)}): str\b", re.MULTILINE)


def fields_of(node: ast.ClassDef) -> set[str]:
    """Names of a class's fields of words."""
    lines = [each for each in node.body if isinstance(each, ast.AnnAssign)]
    return {ast.unparse(each.target) for each in lines if ast.unparse(each.annotation) == "str"}


def test_what_is_wrong_and_why_is_a_finding() -> None:
    found = {
        node.name
        for file in SOURCE.rglob("*.py")
        if SAYS_WHY.search(text := file.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef)
        and fields_of(node) & set(WHY)
        and fields_of(node) & {"name", "kind", "title"}
    }
    assert found <= REASONED, found - REASONED


#: Fields that hold a sentence, and what stands between its parts.
SENTENCES = {
    *("reason", "cause", "title", "text", "message", "meaning", "summary", "detail", "action"),
    *("why", "note", "by_hand", "source"),
}
BETWEEN = re.compile(r"[:;,] | \(|[A-Za-z] [A-Za-z]| [A-Z][a-z]+ ")
TAKES = ("removeprefix", "removesuffix", "partition", "rpartition", "split", "rsplit")


def taken_apart(file: Path) -> list[str]:
    """Places where a sentence is taken apart: a field that holds one, or by what is in one."""
    found: list[str] = []
    text = file.read_text()
    if not any(f".{name}(" in text for name in TAKES):
        return found
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        if node.func.attr not in TAKES:
            continue
        of = node.func.value
        words = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
        between = any(isinstance(word, str) and BETWEEN.search(word) for word in words)
        lines = "'\\n'" in [ast.unparse(word) for word in node.args]
        if not lines and (between or (isinstance(of, ast.Attribute) and of.attr in SENTENCES)):
            found.append(f"{file.relative_to(SOURCE)}:{node.lineno}: {ast.unparse(node)[:80]}")
    return found


def test_no_more_sentences_are_taken_apart() -> None:
    found = [line for file in sorted(SOURCE.rglob("*.py")) for line in taken_apart(file)]
    assert len(found) <= TAKEN_APART, "\n".join(found)


#: Where a frame's variables are read as they are: the one function that leaves nothing behind in
#: the frame, frames of other threads, PyTorch's worker, and frames that are traced.
FRAMES = {
    *("simgpu/device/user_location.py", "torch_private/data_loading.py"),
    *("scripts/call_sites.py", "watch/recorder/looks/stacks.py"),
    *("scripts/phases/periodic.py", "scripts/phases/leaving.py"),
}


def test_variables_of_frames_are_read_in_one_way() -> None:
    """Before Python 3.13 a frame keeps what ``f_locals`` gave, and with it a batch on the GPU."""
    found = {
        str(file.relative_to(SOURCE))
        for file in SOURCE.rglob("*.py")
        if "f_locals" in (text := file.read_text("utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Attribute) and node.attr == "f_locals"
    }
    assert found <= FRAMES
