"""`trainfit doctor`: how long it takes, and whether it finds each cause and withstands damage.

Seconds are of the whole command on this machine: as it is, and with an `nvidia-smi` that
never answers in front of its PATH. The causes are those of the recorded machines in
tests/machines, each of which says which one it has; a cause counts as identified if every
machine that has it is given it, and no other machine is. Mutated machines (files missing,
garbage, unreadable, not UTF-8; probes that fail or hang) have to give verdicts.

    python bench/doctor.py [--quick] [--json]
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from _bench import BenchFigure, finish, parser, trainfit

from helpers_machines import document, machine, mutated, names
from trainfit.doctor.checks import diagnose
from trainfit.hardware.machine.recorded import RecordedSystem
from trainfit.hardware.machine.survey import survey

MUTATIONS = 100


def main() -> int:
    options = parser(__doc__, quick="one run where three are timed").parse_args()
    runs = 1 if options.quick else 3
    plain = min(seconds({}) for _ in range(runs))
    with tempfile.TemporaryDirectory() as folder:
        hanging = seconds(with_hanging_nvidia_smi(Path(folder)))
    found = causes()
    wanted = {name: document(name).get("expected_cause", "") for name in names()}
    identified = {
        cause: all((found[name] == cause) == (wanted[name] == cause) for name in names())
        for cause in set(wanted.values()) - {""}
    }
    failures = mutations()
    figures = [
        BenchFigure("doctor_seconds", plain, 3.0, True, " s"),
        BenchFigure("doctor_seconds_with_hanging_nvidia_smi", hanging, 20.0, True, " s"),
        BenchFigure("causes_identified", sum(identified.values()), len(identified), False),
        BenchFigure("causes_in_table", len(identified), 13, False),
        BenchFigure("mutated_machines_without_verdicts", len(failures), 0, True),
    ]
    details: dict[str, Any] = {
        "causes": identified,
        "machines": {name: [wanted[name], found[name]] for name in names()},
        "failures": failures,
    }
    return finish(figures, options.json, details)


def seconds(environment: dict[str, str]) -> float:
    """Wall time of one `trainfit doctor` in a process of its own."""
    began = time.perf_counter()
    done = trainfit("doctor", "--json", env=environment, stderr=subprocess.PIPE, timeout=120)
    if done.returncode not in (0, 1):
        raise SystemExit(f"trainfit doctor failed: {done.stderr}")
    return time.perf_counter() - began


def with_hanging_nvidia_smi(folder: Path) -> dict[str, str]:
    """A PATH whose nvidia-smi never answers and does not end on request."""
    command = folder / "nvidia-smi"
    command.write_text("#!/bin/sh\ntrap '' TERM INT HUP\nwhile :; do sleep 60; done\n")
    command.chmod(0o755)
    return {"PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}"}


def causes() -> dict[str, str]:
    """By recorded machine: the cause that it was given."""
    found: dict[str, str] = defaultdict(str)
    for name in names():
        (check,) = diagnose(survey(machine(name)), ("gpu",))
        found[name] = check.kind
    return found


def mutations() -> list[str]:
    """What went wrong with mutated machines; each is another damage to another machine."""
    failures = []
    all_names = names()
    for seed in range(MUTATIONS):
        name = all_names[seed % len(all_names)]
        damaged = mutated(document(name), seed)
        try:
            facts = survey(RecordedSystem(damaged))
            checks = diagnose(facts)
        except Exception as error:
            failures.append(f"{name} with seed {seed}: {type(error).__name__}: {error}")
            continue
        if not checks or "trainfit failed" in repr(facts):
            failures.append(f"{name} with seed {seed}: a reader gave up")
    return failures


if __name__ == "__main__":
    sys.exit(main())
