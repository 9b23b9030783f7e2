"""What a training script's own code between the phases does, and what to do instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Habit:
    """What is done there, and its fix."""

    what: str
    action: str


_LESS_OFTEN: Final = (
    "do it less often, or in a thread or process of its own on copies of the tensors"
)
_KNOWN: Final[tuple[tuple[re.Pattern[str], Habit], ...]] = (
    (
        re.compile(r"deepcopy|\bcopy\.|state_dict|EMA|\bema\b"),
        Habit(
            "copies the model or its state",
            "update the average in place (torch.optim.swa_utils.AveragedModel with "
            "get_ema_multi_avg_fn), or every few steps only",
        ),
    ),
    (
        re.compile(r"savez?\w*$|\bdump\b|zipfile|to_csv|to_parquet|imsave|savefig|write_video"),
        Habit("writes a file", f"{_LESS_OFTEN}; what is written often should be small"),
    ),
    (
        re.compile(r"fsync|fdatasync"),
        Habit(
            "waits until a disk has written",
            "do without fsync() in the loop: the system writes by itself; once at a checkpoint is "
            "enough",
        ),
    ),
    (
        re.compile(r"print|logg|\.flush$|\.write$"),
        Habit("logs", "log every 50 steps, and let the file's buffer be: no flush in the loop"),
    ),
    (
        re.compile(r"plt\.|pyplot|matplotlib|add_image|add_histogram|wandb|mlflow|tensorboard"),
        Habit("draws or logs", _LESS_OFTEN),
    ),
    (
        re.compile(r"loss|criterion", re.IGNORECASE),
        Habit(
            "computes the loss in Python",
            "compute it by operators on whole tensors (weights and masks made once, one sum at "
            "the end) instead of a loop over elements",
        ),
    ),
    (
        re.compile(r"^subprocess\.|\bsystem$|popen|check_output", re.IGNORECASE),
        Habit(
            "starts a program",
            "ask the system itself (shutil.disk_usage, psutil, pynvml), or start it every few "
            "hundred steps and do not wait for it",
        ),
    ),
    (
        re.compile(r"gc\.collect|empty_cache"),
        Habit("cleans up memory", "leave it to Python and PyTorch: not in each step"),
    ),
)
_BY_WAIT: Final = {
    "sleep": Habit("sleeps", "remove the sleep, or wait for what is needed only when it is needed"),
    "lock": Habit("waits for a lock", "hold the lock for less, or not while the training needs it"),
    "network": Habit(
        "waits for the network",
        "send from a thread of its own through a queue, many values at once; do not wait for "
        "answers in the loop",
    ),
    "disk": Habit("waits for a file", _LESS_OFTEN),
}
_BATCHES: Final = Habit(
    "makes batches by hand",
    "make samples in a torch.utils.data.Dataset and take batches from a DataLoader with "
    "num_workers=1 or more: they are then made while the step computes",
)
#: What batches are made with. An environment is stepped by other code.
_MAKES: Final = re.compile(
    r"stack|cat\b|concat|tensor|numpy|array|collate|batch|sample|load|choice|perm|randint|index"
)
_ALONE: Final = Habit(
    "runs Python code",
    "do it for many at once, or in a process of its own; if it makes batches, in a Dataset whose "
    "DataLoader has workers",
)
_PYTHON: Final = Habit(
    "runs Python code",
    "use operators on whole tensors instead of loops over elements; move what makes batches into "
    "the data set, so that workers do it; do the rest every few steps",
)


def habit_of(names: Sequence[str], waits_for: str, *, has_loader: bool) -> Habit:
    """Of what is called at a line, from there to the innermost function."""
    text = " ".join(names)
    if waits_for in ("sleep", "lock", "network"):
        return _BY_WAIT[waits_for]
    for pattern, habit in _KNOWN:
        if any(pattern.search(name) for name in names) or pattern.search(text):
            return habit
    if waits_for:
        return _BY_WAIT[waits_for]
    if has_loader:
        return _PYTHON
    return _BATCHES if _MAKES.search(text) else _ALONE
