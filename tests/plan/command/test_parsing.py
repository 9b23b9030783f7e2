"""Reading a training command, and writing it back for a shell."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from helpers_commands import parse, refused
from helpers_python import answering
from trainfit.plan.command.parsing import parse_command
from trainfit.plan.command.tunables import CommandError, loader_values, present_settings
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.text import quote


@pytest.fixture(autouse=True)
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "folder").mkdir()
    (tmp_path / "cells.ipynb").touch()
    monkeypatch.chdir(tmp_path)


# -- tunables --------------------------------------------------------------------------------


def test_placeholders_are_filled_and_the_rest_is_left_alone() -> None:
    command = parse("python train.py --batch_size={batch_size:8} --amp {amp:true} --lr 0.1")
    assert command.present == {"batch_size": "8", "amp": "true"}
    assert command.fill()[2:] == ["--batch_size=8", "--amp", "true", "--lr", "0.1"]
    assert command.fill(batch_size="24")[2:4] == ["--batch_size=24", "--amp"]
    assert command.target(amp="false").args == ("--batch_size=8", "--amp", "false", "--lr", "0.1")


@pytest.mark.parametrize(
    "word",
    [
        "{}",
        "{{}}",
        '{"a": {"b": {}}}',
        "{lr:0.1}",
        "{a,b}",
        "{memory:8GB}",
        "{workers:4}",
        "{workers}",
        "run-{epoch:02d}-{{x}}",
        "optimizer={name:sgd,lr:{base:1}}",
        "größe=π {",
        "--json",
        "--",
        "",
        "two  spaces",
        'it\'s "so"',
        "$HOME `id` !x \\",
    ],
)
def test_other_words_are_untouched(word: str) -> None:
    command = parse_command(["python", "train.py", word, "{batch_size:4}", word])
    assert command.target().args == (word, "4", word)


def test_double_braces_make_a_placeholder_literal() -> None:
    command = parse_command(["python", "train.py", "{{batch_size:8}}", '{"x":{batch_size:8}}'])
    assert command.target(batch_size="9").args == ("{batch_size:8}", '{"x":9}')
    assert command.present == {"batch_size": "8"}


def test_a_placeholder_in_the_environment_is_filled_for_each_run() -> None:
    command = parse("BATCH={batch_size:8} python train.py")
    assert command.environment() == {"BATCH": "8"}
    assert command.environment(batch_size="16") == {"BATCH": "16"}
    assert command.line(batch_size="16") == "BATCH=16 python train.py"


@pytest.mark.parametrize(
    ("value", "other"),
    [
        ("true", "false"),
        ("False", "True"),
        ("1", "0"),
        ("on", "off"),
        ("yes", "no"),
        ("bf16", "no"),
        ("fp16", "no"),
        ("fp32", "bf16"),
        ("bfloat16", "float32"),
        ("float32", "bfloat16"),
        ("16-mixed", "32-true"),
        ("32-true", "bf16-mixed"),
    ],
)
def test_amp_is_switched_in_the_users_spelling(value: str, other: str) -> None:
    assert parse_command(["python", "train.py", f"--amp={{amp:{value}}}"]).other_amp == other


def test_no_is_a_precision_where_the_option_says_so() -> None:
    assert parse("python train.py --mixed_precision {amp:no}").other_amp == "bf16"
    assert parse("python train.py --mixed_precision={amp:no}").other_amp == "bf16"
    assert parse("python train.py --amp {amp:no}").other_amp == "yes"
    assert parse("python train.py").other_amp is None


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("{batch_size}", "no current value"),
        ("{batch_size:}", "no current value"),
        ("{batch_size:0}", "expected a batch size, an integer of 1 or more, got '0'"),
        ("{batch_size:-3}", "expected a batch size, an integer of 1 or more, got '-3'"),
        ("{batch_size:abc}", "expected a batch size, an integer of 1 or more, got 'abc'"),
        ("{batch_size:8.5}", "expected a batch size, an integer of 1 or more, got '8.5'"),
        ("{batch_size:²}", "expected a batch size, an integer of 1 or more, got '²'"),
        ("{bach_size:8}", "did you mean {batch_size:…}?"),
        ("{batch-size:8}", "did you mean {batch_size:…}?"),
        ("{BATCH_SIZE:8}", "did you mean {batch_size:…}?"),
        ("{batch_size:8}{batch_size:9}", "two current values, '8' and '9'"),
        ("{amp:maybe}", "write one of true, false"),
        ("{num_workers}", "no current value"),
        ("{num_workers:-1}", "expected a number of workers, an integer of 0 or more, got '-1'"),
        ("{num_workers:auto}", "a number of workers, an integer of 0 or more, got 'auto'"),
        ("{num_workers:9999999999}", "expected a number of workers"),
        ("{num_worker:4}", "did you mean {num_workers:…}?"),
        ("{num-workers:4}", "did you mean {num_workers:…}?"),
        ("{n_workers:4}", "did you mean {num_workers:…}?"),
        ("{prefetch_factor:0}", "expected a prefetch factor, an integer of 1 or more, got '0'"),
        ("{prefetchfactor:2}", "did you mean {prefetch_factor:…}?"),
        ("{pin_memory:maybe}", "'maybe': expected on or off; write one of true, false"),
        ("{pinned_memory:true}", "did you mean {pin_memory:…}?"),
        ("{persistent_worker:1}", "did you mean {persistent_workers:…}?"),
        ("{num_workers:4}{num_workers:8}", "two current values, '4' and '8'"),
    ],
)
def test_bad_placeholders(word: str, says: str) -> None:
    assert says in refused(shlex.join(["python", "train.py", f"--x={word}"]))


LOADER = (
    "python train.py --j={num_workers:4} --pf={prefetch_factor:2} --pin {pin_memory:False} "
    "--keep={persistent_workers:0}"
)


def test_placeholders_of_the_loader_have_their_present_values() -> None:
    command = parse(LOADER)
    assert command.target().args == ("--j=4", "--pf=2", "--pin", "False", "--keep=0")
    assert present_settings(command.present) == {
        "num_workers": 4,
        "prefetch_factor": 2,
        "pin_memory": False,
        "persistent_workers": False,
    }


def test_settings_are_written_in_the_users_spelling() -> None:
    command = parse(LOADER)
    best = LoaderSettings(6, prefetch_factor=3, pin_memory=True, persistent_workers=True)
    filled = command.fill(**loader_values(command.present, best))
    assert filled[2:] == ["--j=6", "--pf=3", "--pin", "True", "--keep=1"]


def test_without_workers_nothing_is_written_that_pytorch_refuses() -> None:
    command = parse(
        "python train.py {num_workers:2} {prefetch_factor:None} {persistent_workers:yes}"
    )
    assert present_settings(command.present)["prefetch_factor"] is None
    none = loader_values(command.present, LoaderSettings(0, persistent_workers=True))
    assert none == {"num_workers": "0", "prefetch_factor": "None", "persistent_workers": "no"}
    some = loader_values(command.present, LoaderSettings(3, 4, persistent_workers=True))
    assert some == {"num_workers": "3", "prefetch_factor": "4", "persistent_workers": "yes"}


_SPELLINGS = [pair.split() for pair in ("true false", "True False", "1 0", "yes no", "on off")]


@given(
    st.fixed_dictionaries(
        {},
        optional={
            "num_workers": st.integers(0, 512).map(str),
            "prefetch_factor": st.integers(1, 64).map(str) | st.sampled_from(["None", "null"]),
            "pin_memory": st.sampled_from(_SPELLINGS).flatmap(st.sampled_from),
            "persistent_workers": st.sampled_from(_SPELLINGS).flatmap(st.sampled_from),
        },
    ),
    st.builds(
        LoaderSettings,
        st.integers(0, 512),
        st.integers(1, 64),
        pin_memory=st.booleans(),
        persistent_workers=st.booleans(),
    ),
)
def test_what_is_filled_in_says_the_settings(present: dict[str, str], best: LoaderSettings) -> None:
    """And says it where the command did: the filled command can be planned again."""
    words = [f"--{name}={{{name}:{value}}}" for name, value in present.items()]
    command = parse_command(["python", "train.py", *words])
    values = loader_values(command.present, best)
    assert values.keys() == present.keys()
    said = present_settings(values)
    for name, value in said.items():
        if name == "prefetch_factor" and not best.num_workers:
            assert values[name] == present[name]
        elif name == "persistent_workers":
            assert value is (best.persistent_workers and best.num_workers > 0)
        else:
            assert value == getattr(best, name)
    for name in ("pin_memory", "persistent_workers"):
        if name in values:
            pair = next(pair for pair in _SPELLINGS if present[name] in pair)
            assert values[name] in pair
    args = tuple(f"--{name}={values[name]}" for name in present)
    assert command.target(**values).args == args


# -- what is run -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "environment", "arguments"),
    [
        ("A=b python train.py x", {"A": "b"}, ("x",)),
        ("A=b C= python train.py A=b", {"A": "b", "C": ""}, ("A=b",)),
        ("env A=b python train.py", {"A": "b"}, ()),
        ("env -u X A=b python train.py", {"A": "b"}, ()),
        ("taskset -c 0 python train.py", {}, ()),
        ("taskset 0x3 python train.py", {}, ()),
        ("nice -n 5 python train.py", {}, ()),
        ("nice -n5 python train.py", {}, ()),
        ("nice -5 python train.py", {}, ()),
        ("nice python train.py", {}, ()),
        ("A=1 taskset -c 0-7 env B=2 nice -n 5 python train.py", {"A": "1", "B": "2"}, ()),
        ("numactl --cpunodebind 0 --membind=0 python train.py", {}, ()),
        ("nohup stdbuf -oL python train.py", {}, ()),
        ("timeout -k 5 60 python train.py", {}, ()),
    ],
)
def test_prefixes_stay_in_the_launch_command(
    line: str, environment: dict[str, str], arguments: tuple[str, ...]
) -> None:
    command = parse(line)
    assert (command.kind, command.name) == ("script", "train.py")
    assert command.environment() == environment
    assert command.target().args == arguments
    assert command.line() == line


@pytest.mark.parametrize(
    ("line", "flags", "kind", "name", "arguments"),
    [
        ("python3 -O -X dev train.py -c", ("-O", "-X", "dev"), "script", "train.py", ("-c",)),
        ("python -m pkg.mod -m x", (), "module", "pkg.mod", ("-m", "x")),
        ("python -W ignore -mpkg a", ("-W", "ignore"), "module", "pkg", ("a",)),
    ],
)
def test_python_command_lines(
    line: str, flags: tuple[str, ...], kind: str, name: str, arguments: tuple[str, ...]
) -> None:
    command = parse(line)
    assert command.python == sys.executable
    assert command.python_flags == flags
    assert (command.kind, command.name, command.target().args) == (kind, name, arguments)


@pytest.mark.parametrize(
    ("first_lines", "python"),
    [
        ("#!{tmp}/my.venv/bin/python3.12\n", "{tmp}/my.venv/bin/python3.12"),
        ("#!/usr/bin/env python3\n", sys.executable),
        ("#!/usr/bin/env -S python3 -u\n", sys.executable),
        ("#!/bin/sh\n'''exec' \"{tmp}/a long path/python\" \"$0\" \"$@\"\n' '''\n",
         "{tmp}/a long path/python"),
    ],
)  # fmt: skip
def test_console_scripts_name_their_interpreter(
    first_lines: str, python: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python.replace("{tmp}", str(tmp_path))
    for other in ("my.venv/bin/python3.12", "a long path/python"):
        answering(tmp_path / other)
    program = tmp_path / "my-train"
    program.write_text(first_lines.replace("{tmp}", str(tmp_path)))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    command = parse("my-train --batch {batch_size:2}")
    assert (command.python, command.kind, command.name) == (python, "script", str(program))
    assert command.line(batch_size="4") == "my-train --batch 4"


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("", "no command: write the training command after --"),
        ("A=b", "no program is named"),
        ("python", "no script after python"),
        ("python -c 'print(1)'", "put it into a script"),
        ("python -", "put it into a script"),
        ("python nowhere.py", "'nowhere.py': there is no such file"),
        ("python folder", "'folder' is a folder"),
        ("python cells.ipynb", "is a notebook, which Python does not run; write its cells"),
        ("./nowhere/python train.py", "'./nowhere/python': there is no such program"),
        ("train.py", "begin the command with `python train.py`"),
        ("./train.py", "'./train.py': is not executable; begin the command with `python ./train"),
        ("folder/no.py", "'folder/no.py': there is no such program"),
        ("no-such-program", "there is no such program"),
        ("ls -l", "is not a Python program"),
        ("horovodrun train.py", "'horovodrun' starts the training in its own processes"),
        ("bash -c 'python train.py'", "'bash' runs a shell's script"),
        ("'python train.py --lr 1'", "write the training command without quotes around it"),
        ("'cd src && python train.py'", "write the training command without quotes around it"),
        ("python 'python no.py'", "write the training command without quotes around it"),
    ],
)
def test_commands_that_cannot_be_run(line: str, says: str) -> None:
    assert says in refused(line)


# -- for the shell ---------------------------------------------------------------------------

# What a word of a command line can hold: anything but NUL.
_TEXT = st.text(st.characters(min_codepoint=1, exclude_categories=["Cs"]), max_size=30)
_LATIN = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=30)


@given(st.lists(_LATIN, max_size=6))
def test_printable_launch_commands_split_into_the_same_words(words: list[str]) -> None:
    line = " ".join(map(quote, ["python", "train.py", *words]))
    assert shlex.split(line) == ["python", "train.py", *words]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(_TEXT, _LATIN), max_size=6))
@example(["A=b c", "\x1b[31m", "new\nline", "ta\tb", "it's", "\\", "é=1 2", "~", "=", "~/x=1"])
def test_launch_commands_mean_the_same_to_bash(words: list[str]) -> None:
    line = " ".join(map(quote, words))
    assert line.isprintable()
    done = subprocess.run(
        ["bash", "-c", f"printf '%s\\0' {line}"] if words else ["true"],
        capture_output=True,
        env={"LC_ALL": "C.UTF-8", "PATH": os.environ["PATH"]},
        check=True,
    )
    assert [os.fsdecode(word) for word in done.stdout.split(b"\0")[:-1]] == words


@given(st.lists(_LATIN, max_size=6))
def test_a_command_survives_parsing_and_writing(words: list[str]) -> None:
    line = " ".join(map(quote, ["python", "train.py", *words]))
    try:
        command = parse_command(shlex.split(line))
    except CommandError:
        return  # a word that reads as a bad placeholder
    if not command.present:
        again = parse_command(shlex.split(command.line()))
        assert again.target() == command.target()
