"""The recorded machines of `tests/machines`, and mutated copies of them.

``machine(name)`` replays one; ``mutated(document, seed)`` damages a copy as disks, drivers and
users do; ``hanging(document)`` is a copy whose driver never answers.
"""

from __future__ import annotations

import base64
import copy
import json
import random
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainfit.hardware.machine.recorded import RecordedSystem, replayed

MACHINES = Path(__file__).with_name("machines")

#: Environment variables that a mutation may set, and to what.
_VARIABLES = (
    "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENCV_FOR_THREADS_NUM",
    "SLURM_CPUS_PER_TASK", "NVIDIA_VISIBLE_DEVICES", "TOKENIZERS_PARALLELISM",
)  # fmt: skip
_VALUES = (
    "",
    "abc",
    "-1",
    "0",
    "4,2,1",
    "99999999999999999999",
    "0,,1",
    "１",
    "\x1b[31mred",
    "nan",
)
_TEXTS = (
    "", "\n\n\n", "garbage", "-1", "-9223372036854775808", "99999999999999999999999999", "1e308",
    "nan", "inf", "0", "max", "0-", "-", "3-1", "0-99999999", "a:b:c", "\t:\t", " - - - ",
    "\x1b[2J\x1b[31m", "{}", "0::", "x" * 5000, "[[[[", "½", "0x", "12,,7", "\0\0\0",
)  # fmt: skip
_ANYTHING: tuple[Any, ...] = (
    None, "", "garbage", -1, 2**70, 1e308, True, [], {}, [[]], [None], {"error": None}, "\x1b[31m",
    {"error": "NVML_ERROR_GPU_IS_LOST"}, [1, 2, 3], "x" * 3000, [{}], 0, 0.5,
)  # fmt: skip


def names() -> tuple[str, ...]:
    """The names of all recorded machines."""
    return tuple(sorted(path.stem for path in MACHINES.glob("*.json")))


def document(name: str) -> dict[str, Any]:
    """A machine's document, as it was written."""
    whole: dict[str, Any] = json.loads((MACHINES / f"{name}.json").read_text(encoding="utf-8"))
    return whole


def machine(name: str) -> RecordedSystem:
    """A recorded machine."""
    return replayed(MACHINES / f"{name}.json")


def hanging(original: Mapping[str, Any]) -> dict[str, Any]:
    """A copy whose driver never answers: every command and every probe hangs."""
    changed = copy.deepcopy(dict(original))
    for kind in ("commands", "probes"):
        changed[kind] = {name: {"hangs": True} for name in changed[kind]}
    return changed


def mutated(original: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """A damaged copy, always the same for the same ``seed``; it still replays.

    Files are missing, empty, garbage, cut off, not UTF-8, unreadable (EACCES, EIO), folders or
    links to nowhere, their numbers negative or huge; of the seeds, some damage one file, some
    all. Probes and commands give garbage, fail, hang or are missing; calls lose their answers.
    """
    chance = random.Random(seed)
    changed = copy.deepcopy(dict(original))
    share = chance.choice((0.0, 0.02, 0.1, 0.4, 1.0))
    leaves = _leaves(changed["files"])
    for path in chance.sample(leaves, max(1, round(share * len(leaves)))):
        _damage(changed["files"], path, chance)
    for kind in ("probes", "commands"):
        for name in list(changed[kind]):
            if chance.random() < max(share, 0.25):
                _spoil(changed[kind], name, chance, kind == "probes")
    _forget(changed["calls"], chance, share)
    if chance.random() < 0.5:
        changed["environment"][chance.choice(_VARIABLES)] = chance.choice(_VALUES)
    return changed


def _leaves(files: Mapping[str, Any]) -> list[str]:
    """The paths that no other path lies below, links aside (others are read through them)."""
    above = {str(each) for path in files for each in Path(path).parents}
    return [path for path in sorted(files) if path not in above]


def _damage(files: dict[str, Any], path: str, chance: random.Random) -> None:
    content = files[path]
    if isinstance(content, list) and chance.random() < 0.5:  # one of a range
        number = chance.randrange(len(content))
        content[number] = _damaged(content[number], chance)
    elif chance.random() < 0.15:
        del files[path]
    elif isinstance(content, list):
        files[path] = [_damaged(each, chance) for each in content]
    else:
        files[path] = _damaged(content, chance)


def _damaged(content: Any, chance: random.Random) -> Any:
    text = content if isinstance(content, str) else "0"
    raw = text.encode() or b"0"
    ways: tuple[Callable[[], Any], ...] = (
        lambda: chance.choice(_TEXTS),
        lambda: {"error": "EACCES"},
        lambda: {"error": "EIO"},
        lambda: {"base64": base64.b64encode(b"\xff\xfe" + raw).decode()},
        lambda: {"base64": base64.b64encode(chance.randbytes(64)).decode()},
        lambda: text[: chance.randrange(len(text) + 1)],
        lambda: _numbers(text, lambda digit: "-" + digit),
        lambda: _numbers(text, lambda digit: digit + "9" * 24),
        lambda: _numbers(text, lambda digit: "0"),
        lambda: "".join(chance.sample(text, len(text))) if len(text) < 10_000 else text[::-1],
        lambda: {"folder": True},
        lambda: {"link": "/nowhere/at/all"},
    )
    return chance.choice(ways)()


def _numbers(text: str, change: Callable[[str], str]) -> str:
    return " ".join(change(word) if word.isdecimal() else word for word in text.split(" "))


def _spoil(answers: dict[str, Any], name: str, chance: random.Random, is_probe: bool) -> None:
    way = chance.randrange(6)
    if way == 0:
        del answers[name]
    elif way == 1:
        answers[name] = {"hangs": True}
    elif way == 2:
        answers[name] = {"fails": "killed by signal 11"}
    elif not is_probe:
        answers[name] = {
            "code": chance.choice((0, 1, -9, 255)),
            "stdout": chance.choice(_TEXTS),
            "stderr": chance.choice(_TEXTS),
        }
    elif way == 3:
        answers[name] = chance.choice(({}, {"unexpected": 1}, {"error": "NVML_ERROR_TIMEOUT"}))
    else:
        _scramble(answers[name], chance, 0.15 if way == 4 else 0.9)


def _scramble(answer: Any, chance: random.Random, share: float) -> None:
    """Put anything in place of some of the values within."""
    keys = list(answer) if isinstance(answer, dict) else range(len(answer))
    for key in keys:
        if chance.random() < share:
            answer[key] = copy.deepcopy(chance.choice(_ANYTHING))
        elif isinstance(answer[key], dict | list):
            _scramble(answer[key], chance, share)


def _forget(calls: dict[str, Any], chance: random.Random, share: float) -> None:
    """What `os` and psutil answer is well-formed, but may be missing or odd."""
    odd: dict[str, Any] = {
        "affinity": None, "limits": {"NOFILE": [0, 0]}, "packages": {}, "processes": {},
        "sizes": {}, "read_rates": {}, "own_pids": [], "folder": "/",
        "spaces": {"/": [0, 0], "/dev/shm": [0, 0]},
    }  # fmt: skip
    for name, value in odd.items():
        if name in calls and chance.random() < max(share / 2, 0.1):
            if value is None:
                del calls[name]
            else:
                calls[name] = value
