"""The walk through the documentation: what it reads, compares and writes, and a short one."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from helpers_cases import slow_but

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "bench"

#: Commands of a few seconds, none of which times anything.
QUICK = (
    *("trainfit gpus", "trainfit doctor --machine", "trainfit batch explain --noise-scale"),
    *("trainfit simulate --gpu T4", "trainfit show recording.trainfit"),
)

PAGE = """# A page

<!-- not run `verify`: it needs a GPU -->
<!-- exit code 1 `doctor`: something may be bad -->

    trainfit doctor             # a remark
    trainfit plan --gpu "T4" -- python train.py \\
        --epochs 1
    trainfit verify plan.json

Save this:

```python title="train.py"
print(1)
```

It prints

<!-- screen of `trainfit doctor` -->
<!-- measured -->

    ok  1.2 GiB
    …

<!-- no screen: a formula -->

    time = 1

Then

    trainfit loader -- python x.py …

```python
import trainfit
```
"""


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    before = set(sys.modules)
    sys.path.insert(0, str(BENCH))
    names = ("_walk", "_walk_pages", "_walk_place", "_walk_screens")
    found = {name.removeprefix("_"): importlib.import_module(name) for name in names}
    yield SimpleNamespace(**found)
    sys.path.remove(str(BENCH))
    for name in {"_walk", "_walk_pages", "_walk_place", "_walk_screens"} - before:
        sys.modules.pop(name, None)


def test_a_page_is_read_in_order(bench: Any) -> None:
    read = bench.walk_pages
    doctor, plan, verify, file, screen, loader, python = read.parts(PAGE)
    assert doctor == read.TypedCommand("trainfit doctor", 6, codes=frozenset({0, 1}))
    assert plan.text == 'trainfit plan --gpu "T4" -- python train.py --epochs 1'
    assert plan.codes == {0} and plan.reason is None and plan.line == 7
    assert verify.reason == "it needs a GPU"
    assert (file.name, file.text) == ("train.py", "print(1)\n")
    assert screen.command == "trainfit doctor" and screen.measured
    assert screen.text == ("ok  1.2 GiB", "…")
    lines = PAGE.split("\n")[screen.first : screen.end]
    assert lines == ["    ok  1.2 GiB", "    …"]
    assert loader.reason == "the reader's own command"
    assert python.text == "import trainfit\n"


def test_a_screen_is_of_the_last_command(bench: Any) -> None:
    command, screen = bench.walk_pages.parts(
        "Type\n\n    trainfit gpus T4\n\nIt prints\n\n    T4\n"
    )
    assert screen.command == command.text == "trainfit gpus T4"
    assert not screen.measured


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ("Look:\n\n    a screen\n", "no command before it"),
        ("<!-- not runn: x -->\n\n    trainfit gpus\n", "no known form"),
        ("    trainfit gpus\n\n<!-- measured -->\n\nText.\n", "no block follows"),
    ],
)
def test_what_cannot_be_read_is_an_error(bench: Any, page: str, said: str) -> None:
    with pytest.raises(bench.walk_pages.PageError, match=said):
        bench.walk_pages.parts(page)


def test_every_page_can_be_read(bench: Any) -> None:
    read = bench.walk_pages
    found = {name: read.parts((ROOT / name).read_text("utf-8")) for name in bench.walk.pages()}
    commands = [p for parts in found.values() for p in parts if isinstance(p, read.TypedCommand)]
    reasons = [command for command in commands if command.reason is not None]
    guides = {f"docs/guide/{guide.name}" for guide in (ROOT / "docs" / "guide").glob("*.md")}
    assert found.keys() >= {"README.md", "docs/getting-started.md", *guides}
    assert len(commands) > 60
    # Most of what a reader is told to type is typed.
    assert len(reasons) < len(commands) / 5, [command.text for command in reasons]


def test_files_of_one_name_are_one_file(bench: Any) -> None:
    read = bench.walk_pages
    texts: dict[str, str] = {}
    for name in bench.walk.pages():
        for part in read.parts((ROOT / name).read_text("utf-8")):
            if isinstance(part, read.SavedFile):
                assert texts.setdefault(part.name, part.text) == part.text, (name, part.name)


@pytest.mark.parametrize(
    ("line", "form"),
    [
        ("Fits: 5.50 GiB of 23.64 GiB", "Fits: SIZE of SIZE"),
        ("8 (79.1 ms a step,   101 samples/s)", "N (TIME a step, N samples/s)"),
        ("in 9 h 43 min, for 2.14 USD", "in TIME , for N USD"),
        ("backward  21%  22.4 ms  █████", "backward N% TIME BAR"),
        ("10 launches, -1% of 1,044", "N launches, N% of N"),
        ("RTX 4090, conv2d, torch 2.13.0+cpu, 32 s)", "RTX N, conv2d, torch VERSION, TIME)"),
    ],
)  # fmt: skip
def test_figures_are_masked_by_their_kind(bench: Any, line: str, form: str) -> None:
    assert bench.walk_screens.masked(line) == form


PRINTED = [
    "Fits: 5.5 GiB of 24 GiB.",
    "  python train.py",
    "",
    "Memory",
    "  device  5.5 GiB",
    "end",
]


@pytest.mark.parametrize(
    ("sample", "measured", "missing"),
    [
        (PRINTED, False, []),
        (["Fits: 5.5 GiB of 24 GiB.", "…", "device 5.5 GiB", "…"], False, []),
        (["Fits: 5.4 GiB of 24 GiB.", "…"], False, ["Fits: 5.4 GiB of 24 GiB."]),
        (["Fits: 800 MiB of 24 GiB.", "…"], True, []),
        (["Fits: 5.5 GiB of 24 GiB.", "device 5.5 GiB", "…"], False, ["device 5.5 GiB"]),
        (["Fits: 5.5 GiB of …", "…"], False, []),
        (["…", "device 5.5 GiB", "…", "Memory"], False, ["Memory"]),
        (["Does not fit", "…"], True, ["Does not fit"]),
    ],
)
def test_a_sample_is_compared(
    bench: Any, sample: list[str], measured: bool, missing: list[str]
) -> None:
    assert bench.walk_screens.different(sample, PRINTED, measured) == missing


def test_a_sample_may_not_end_early(bench: Any) -> None:
    (missing,) = bench.walk_screens.different(PRINTED[:2], PRINTED, False)
    assert missing.endswith("Memory")


def test_a_whole_sample_is_written_whole(bench: Any) -> None:
    assert bench.walk_screens.rewritten(["old"], ["", *PRINTED, ""]) == PRINTED
    long = [f"line {number}" for number in range(40)]
    assert bench.walk_screens.rewritten(["old"], long) == [*long[:25], "…"]


def test_an_abridged_sample_keeps_its_lines(bench: Any) -> None:
    sample = ["Fits: 900 MiB of 8 GiB.", "  python train.py", "…", "  device  900 MiB", "…"]
    assert bench.walk_screens.rewritten(sample, PRINTED) == [
        *PRINTED[:2],
        "  …",
        "  device  5.5 GiB",
        "…",
    ]
    # Other words, and a line that is gone.
    sample = ["Fits: 900 MiB", "…", "gone and never seen", "  devices   900 MiB", "…"]
    assert bench.walk_screens.rewritten(sample, PRINTED)[-2:] == ["  device  5.5 GiB", "…"]
    assert bench.walk_screens.rewritten(["nothing like it at all", "…"], PRINTED) == PRINTED


WRAPPED = [
    "BAD  gpu   the loaded driver is 550.90.07 and was made for other libraries, the",
    "           libraries are not",
    "     why   an update",
    "     fix   sudo reboot",
]


def test_wrapped_lines_are_one(bench: Any) -> None:
    screens = bench.walk_screens
    sample = [" ".join(line.strip() for line in WRAPPED[:2]), "…"]
    assert screens.different(sample, WRAPPED, False) == []
    assert screens.different([WRAPPED[0], "…"], WRAPPED, False) == [WRAPPED[0]]
    # A sample that was wrapped elsewhere.
    sample = ["BAD  gpu   the loaded driver is 1.2 and was made for", "  other libraries", "…"]
    assert screens.rewritten(sample, WRAPPED) == [*WRAPPED[:2], "…"]
    assert screens.rewritten(["…", "     fix   sudo reboot"], WRAPPED) == ["     …", WRAPPED[3]]


def test_what_was_written_is_a_true_sample(bench: Any) -> None:
    for sample in (["x"], ["Fits: 1 GiB of 2 GiB.", "…"], ["…", "device 1 GiB", "…"]):
        written = bench.walk_screens.rewritten(sample, PRINTED)
        assert bench.walk_screens.different(written, PRINTED, False) == []


@pytest.fixture(scope="module")
def place(bench: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    if not (ROOT / ".git").exists():
        pytest.skip("no repository to clone: this is a source archive")
    folder = tmp_path_factory.mktemp("walk") / "place"
    return bench.walk_place.CloneFolder(folder, bench.walk_place.default_lent())


def test_a_shell_keeps_its_folder_and_variables(place: Any) -> None:
    assert place.run("cd docs && export A='b c'").code == 0
    assert place.run('echo "$A"; basename "$PWD"').out == "b c\ndocs\n"
    assert place.run("cd ..; false").code == 1
    assert place.run("sleep 30", limit_s=0.5).code == 124
    assert place.run("echo $HOME").out.strip() == str(place.folder / "home")


def test_an_installation_is_typed_once(bench: Any, place: Any, tmp_path: Path) -> None:
    own = bench.walk_place.CloneFolder(tmp_path / "own")
    assert place.has("pip install '.[report]'") == "the environment is lent"
    assert place.has("make plan") is place.has("trainfit gpus") is None
    assert own.has("cd trainfit") is None
    assert own.has("cd trainfit") == "typed before"


def test_the_lent_environment_has_the_clones_trainfit(place: Any) -> None:
    place.run(". .venv/bin/activate")
    assert place.run("which trainfit").out.strip() == str(place.clone / ".venv/bin/trainfit")
    asked = place.run("python -c 'import trainfit; print(trainfit.__file__)'")
    assert asked.out.strip() == str(place.clone / "src/trainfit/__init__.py")


# What the other guides type is simulated, or starts a process each; tests/cli has their verbs.
@pytest.mark.slow
@pytest.mark.parametrize("page", slow_but(["gpus", "doctor", "batch", "memory"], "doctor", "batch"))
def test_quick_commands_of_the_guides(bench: Any, place: Any, page: str) -> None:
    walk = bench.walk.Walk(
        place, wanted=lambda text: text.startswith(QUICK) and "plan.json" not in text
    )
    walk.save_files()
    outcomes = list(walk.page(f"docs/guide/{page}.md"))
    assert [o.row for o in outcomes if o.verdict in ("failed", "differs")] == []
    assert [o for o in outcomes if o.verdict == "ok"]


def test_screens_are_written_into_their_page(
    bench: Any, place: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (
        "Type\n\n    python -c 'print(1); print(2)'\n\nIt prints\n\n    …\n\nand\n\n"
        "<!-- screen of `python -c 'exit(3)'` -->\n\n    3\n\nEnd.\n"
    )
    (tmp_path / "page.md").write_text(page)
    monkeypatch.setattr(bench.walk, "ROOT", tmp_path)
    walk = bench.walk.Walk(place)
    verdicts = [outcome.verdict for outcome in walk.page("page.md")]
    assert verdicts == ["ok", "ok", "differs"]
    assert walk.write() == ["page.md"]
    assert (tmp_path / "page.md").read_text() == page.replace("    …", "    1\n    2")


@pytest.mark.slow
def test_everything_that_a_reader_types(bench: Any, tmp_path: Path) -> None:
    """README, Getting started and the guides in order, in a clone of their own."""
    walk = bench.walk.Walk(
        bench.walk_place.CloneFolder(tmp_path / "place", bench.walk_place.default_lent())
    )
    walk.prepare()
    outcomes = [outcome for page in bench.walk.pages() for outcome in walk.page(page)]
    assert [o.row for o in outcomes if o.verdict in ("failed", "differs")] == []
