"""The launch line of a plan as a script to keep: for a shell, Slurm's sbatch, or docker run.

What the plan does not know is no option, but a comment that says so.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Final, Literal

from trainfit.report.changes import change_lines, part_reason
from trainfit.report.layout import command_lines
from trainfit.report.sections.plan_facts import answer
from trainfit.results.dataloader import Candidate, LoaderSettings
from trainfit.results.files.errors import TrainfitError
from trainfit.results.plan import PlanResult
from trainfit.results.text import GIB, count, duration, printable, quoted_words, size, wrapped
from trainfit.version import __version__

LaunchForm = Literal["sh", "sbatch", "docker"]

_WIDTH: Final = 96
_SHELL: Final = "#!/usr/bin/env bash"
_ASSIGNMENT: Final = re.compile(r"[A-Za-z_]\w*=")
#: Docker's own size of /dev/shm.
_DOCKER_SHM: Final = 64 << 20


class LaunchScriptError(TrainfitError):
    """A plan without a launch line: its job does not fit."""

    exit_code = 1


def launch_script(result: PlanResult, form: LaunchForm) -> str:
    """A script of bash that runs the launch line; raises :class:`LaunchScriptError`."""
    if not result.can_start:
        raise LaunchScriptError(
            f"{answer(result)} There is no launch line to write; the plan without --format names "
            "what would lower the memory"
        )
    return "\n".join([*_FORMS[form](result), ""])


def _sh(result: PlanResult) -> Iterator[str]:
    yield _SHELL
    yield from _head(result)
    yield "set -eu"
    yield ""
    yield command_lines(result.launch, 0, _WIDTH)


def _sbatch(result: PlanResult) -> Iterator[str]:
    yield _SHELL
    yield f"#SBATCH --job-name={_name(result)}"
    yield "#SBATCH --nodes=1"
    yield "#SBATCH --ntasks=1"
    yield from _comment(
        f"Planned for {result.gpu}: your cluster may want its own name of it, as in gpu:a100:1."
    )
    yield "#SBATCH --gres=gpu:1"
    settings, candidate = _launched(result), _candidate(result)
    if settings is None:
        yield from _comment(
            "Not known: --cpus-per-task, as the DataLoader was not measured (its workers and one)."
        )
    else:
        yield from _comment(f"{count(settings.num_workers, 'worker')} and the main process.")
        yield f"#SBATCH --cpus-per-task={settings.num_workers + 1}"
    workers = ""
    if candidate is not None and candidate.ram_bytes:
        workers = f"; the DataLoader's workers need {size(candidate.ram_bytes)} of it"
    yield from _comment(f"Not known: --mem, the main process's memory was not measured{workers}.")
    epoch = ""
    if result.speed is not None and result.speed.epoch_s is not None:
        now = result.now.batch_size
        text = f" at batch size {now}" if now else ""
        epoch = (
            f"; an epoch{text} needs at least {duration(result.speed.epoch_s)} "
            "(predicted, if the DataLoader keeps up)"
        )
    yield from _comment(f"Not known: --time, as the number of epochs is the script's{epoch}.")
    yield ""
    yield from _head(result)
    yield "set -eu"
    yield ""
    yield command_lines(result.launch, 0, _WIDTH)


def _docker(result: PlanResult) -> Iterator[str]:
    words = quoted_words(result.launch)
    variables = []
    while words and _ASSIGNMENT.match(words[0]):
        variables.append(words.pop(0))
    yield _SHELL
    yield from _comment(
        "Not known: the image. Set IMAGE to one that has PyTorch and what the script imports."
    )
    yield from _comment(
        "This folder is mounted under its own path; add -v PATH:PATH for data that lies elsewhere. "
        "Files that the script writes belong to the user of the image, which may be root."
    )
    if words and "/" in words[0]:
        yield from _comment(f"{words[0]} is of this machine: write the image's interpreter.")
    yield from _head(result)
    yield "set -eu"
    yield ': "${IMAGE:?set it to the name of an image}"'
    yield ""
    options = ["--rm", "--gpus 1", *_shared_memory(result), '-v "$PWD":"$PWD" -w "$PWD"']
    options += [f"-e {variable}" for variable in variables]
    lines = ["docker run", *options, '"$IMAGE"']
    yield " \\\n  ".join(printable(line) for line in lines) + " \\"
    yield command_lines(" ".join(words), 2, _WIDTH)


_FORMS: Final[Mapping[LaunchForm, Callable[[PlanResult], Iterator[str]]]] = {
    "sh": _sh,
    "sbatch": _sbatch,
    "docker": _docker,
}


def _shared_memory(result: PlanResult) -> list[str]:
    """Workers hand batches on through /dev/shm, of which a container has 64 MiB."""
    settings, candidate = _launched(result), _candidate(result)
    if settings is not None and settings.num_workers == 0:
        return []
    if candidate is None or candidate.shm_bytes is None:
        return ["--ipc host"]
    # Twice as much: other jobs and larger batches come.
    return [f"--shm-size {math.ceil(max(2 * candidate.shm_bytes, _DOCKER_SHM) / (1 << 20))}m"]


def _head(result: PlanResult) -> Iterator[str]:
    """What to change by hand first, and the reason of each part."""
    yield from _comment(f"By trainfit {__version__}: {answer(result)}")
    changes = change_lines(result.launch_parts)
    if changes:
        yield from _comment("First, as the command cannot say it:")
        for change in changes:
            yield from _comment(f"- {change}")
    reasons = [part_reason(part) for part in result.launch_parts if part.status in ("set", "kept")]
    if reasons:
        yield from _comment("Why:")
        for reason in reasons:
            yield from _comment(f"- {reason}")
    note = _memory_note(result)
    if note:
        yield from _comment(note)


def _memory_note(result: PlanResult) -> str:
    """Which memory of /dev/shm the workers need, as containers of any kind have little."""
    candidate = _candidate(result)
    if candidate is None or not candidate.shm_bytes or candidate.shm_bytes < _DOCKER_SHM // 2:
        return ""
    return f"Batches in flight need {candidate.shm_bytes / GIB:.2f} GiB of /dev/shm."


def _comment(text: str) -> Iterator[str]:
    yield from wrapped(printable(text), "# ", "#   ", _WIDTH).split("\n")


def _name(result: PlanResult) -> str:
    """The script's, for a queue."""
    words = [word.strip("'\"") for word in quoted_words(result.command)]
    scripts = [word for word in words if word.endswith(".py")]
    name = PurePath(scripts[0]).stem if scripts else "train"
    return re.sub(r"[^A-Za-z0-9_.-]", "_", name)


def _launched(result: PlanResult) -> LoaderSettings | None:
    """The DataLoader's settings that the launch line is for; ``None``: not measured."""
    loading = result.loading
    if loading is None or loading.result is None:
        return None
    return loading.launched or loading.result.recommended


def _candidate(result: PlanResult) -> Candidate | None:
    settings = _launched(result)
    loading = result.loading
    if settings is None or loading is None or loading.result is None:
        return None
    return loading.result.candidate(settings)
