"""Real runs with a symptom each, and what `trainfit watch` must say of them.

The articles that this project began with, and the practice of others, name them
(docs/guide/watch.md). The script is ``tests/watch/real/symptoms.py``; what a GPU would compute is a
pause there, so that it runs alike on any machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from helpers_cli import trainfit
from trainfit.results.watch import WatchResult

SCRIPT: Final = Path(__file__).parent / "watch" / "real" / "symptoms.py"


@dataclass(frozen=True)
class Symptom:
    """Options of the script, and the verdict: kinds of findings that are there and that are not,
    what bounds the run, words of the first finding's cause and its settings.

    ``limit`` and ``settings`` are empty where they depend on the machine. ``slow``: it takes long,
    or what is found follows from how long things take, which other programs change.
    """

    options: str
    found: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    limit: str = ""
    cause: str = ""
    settings: Mapping[str, str] = field(default_factory=dict)
    slow: bool = False

    def check(self, result: WatchResult) -> None:
        """Raises ``AssertionError``."""
        kinds = [each.kind for each in result.findings]
        assert set(self.found) <= set(kinds), kinds
        assert not set(self.absent) & set(kinds), kinds
        assert not self.limit or result.limit == self.limit
        if self.found:
            first = next(each for each in result.findings if each.kind == self.found[0])
            assert self.cause in first.cause, first.cause
            assert self.settings.items() <= first.fix.settings.items(), first.fix.settings


SYMPTOMS: Final[dict[str, Symptom]] = {
    # batch_size=1 and num_workers=1: GPU-Util often falls to 0; with 8 workers rarely.
    "starved": Symptom("--workers=1 --sleep=0.08 --steps=60", ("input_bound",), limit="input",
                       cause="Too few workers: 1 of", slow=True),
    "fed": Symptom("--workers=8 --sleep=0.08 --steps=60", absent=("input_bound", "no_workers"),
                   slow=True),
    "sleeping": Symptom("--step=0.05 --steps=60", ("script_waits",), ("input_bound",),
                        limit="script", slow=True),
    "no-workers": Symptom("--sleep=0.05 --steps=60", ("no_workers",), limit="input",
                          settings={"persistent_workers": "True"}, slow=True),
    "threads": Symptom("--workers=4 --threads=8 --steps=200 --step=0.01",
                       ("thread_oversubscription",), ("too_many_workers",),
                       cause="torch starts 8 threads in each worker", slow=True),
    "too-many-workers": Symptom("--workers=8 --cpu=0.05 --step=0.01 --steps=110",
                                ("input_bound", "too_many_workers"),
                                ("thread_oversubscription",), cause="All cores are busy",
                                slow=True),
    "slow-worker": Symptom("--workers=4 --sleep=0.005 --slow-worker=0.12 --step=0.005 --steps=80",
                           ("slow_worker",), ("no_workers",), limit="input", slow=True),
    "epoch-start": Symptom("--workers=2 --batches=16 --worker-start=0.4 --step=0.005 --steps=80",
                           ("epoch_start",), limit="input",
                           settings={"persistent_workers": "True"}, slow=True),
    "workers-stay": Symptom("--workers=2 --batches=16 --worker-start=0.4 --step=0.005 --steps=80 "
                            "--persistent", absent=("epoch_start",), slow=True),
    # One of eight batches is slow: pauses of 1 to 2 s now and then.
    "uneven": Symptom("--workers=2 --sleep=0.01 --every-eighth=0.4 --step=0.03 --steps=70",
                      ("input_bound",), limit="input", cause="times as long as usual",
                      settings={"prefetch_factor": "8"}, slow=True),
    "decoding": Symptom("--workers=1 --image=decode --step=0.005 --steps=70", ("input_bound",),
                        limit="input", cause="decoding", slow=True),
    "augmentation": Symptom("--workers=1 --image=transform --step=0.005 --steps=70",
                            ("input_bound",), limit="input", cause="transforms", slow=True),
    "hand-off": Symptom("--workers=2 --tensors=200 --step=0.002 --steps=50", ("input_bound",),
                        limit="input", cause="hand-off", slow=True),
    "checkpoints": Symptom("--checkpoint=0.1 --step=0.01 --steps=60", ("checkpoint_stalls",),
                           limit="checkpoint", slow=True),
    # What no other program on the machine can change.
    "nan": Symptom("--checkpoint=0.1 --step=0.01 --steps=60 --nan-from=25", ("loss_not_finite",)),
    "evaluation-overflow": Symptom("--evaluate --step=0.005 --steps=60 --overflow",
                                   ("skipped_steps", "evaluation_share"), ("loss_not_finite",),
                                   slow=True),
    # Memory that grows shows after 20 s of samples.
    "leak": Symptom("--leak=400000 --step=0.02 --steps=1100", ("ram_growth",), slow=True),
}  # fmt: skip


def watched(folder: Path, options: str, *before: str) -> WatchResult:
    """Run the script under `trainfit watch` with these options; ``before`` is put before it."""
    words: list[Any] = ["watch", "--quiet", "--folder", folder / "run"]
    words += ["--output", folder / "result.json", "--", *before]
    done = trainfit(*words, sys.executable, SCRIPT, *options.split(), cwd=folder)
    assert done.returncode == 0, done.stderr
    assert json.loads((folder / "result.json").read_text())["format"] == "trainfit-watch"
    return WatchResult.load(folder / "result.json")
