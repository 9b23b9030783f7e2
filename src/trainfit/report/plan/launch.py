"""A launch command as text: over several lines, the reason of each part, as a script to keep."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Final, Literal

from trainfit.report.plan.speed import answer
from trainfit.results.changes import NOT_NEEDED, LaunchPart, changes_by_hand
from trainfit.results.dataloader import Candidate, LoaderSettings
from trainfit.results.files.errors import TrainfitError
from trainfit.results.plan import PlanResult
from trainfit.results.text import GIB, columns, count, duration, printable, size, wrapped
from trainfit.version import __version__

#: A word of a bash command line, quotes and all.
_WORD = re.compile(r"""(?:\$'(?:\\.|[^'\\])*'|'[^']*'|"[^"]*"|\\.|[^\s'"\\])+""")


def launch_lines(launch: str, indent: int = 2, width: int | None = None) -> str:
    """The launch command, indented and broken between options; bash reads it as one line."""
    width = width or columns()
    lines: list[str] = []
    for group in _option_groups(shell_words(launch)):
        if lines and len(lines[-1]) + 1 + len(group) <= width - 2:
            lines[-1] += " " + group
        else:
            lines.append(" " * (indent + 2 if lines else indent) + group)
    return " \\\n".join(printable(line) for line in lines)


def shell_words(command: str) -> list[str]:
    """The words of a bash command line, as they are written."""
    return _WORD.findall(command)


def _option_groups(words: list[str]) -> list[str]:
    """An option and its values stay together."""
    groups: list[str] = []
    previous_is_option = False
    for word in words:
        is_option = word.startswith("-")
        if previous_is_option and not is_option and "=" not in groups[-1]:
            groups[-1] += " " + word
        else:
            groups.append(word)
        previous_is_option = is_option
    return groups


# ---
# Reasons for the parts of a launch command.


#: Where the text of a part begins.
_COLUMN = 31


def parts_section(parts: Sequence[LaunchPart]) -> str:
    """A line for each part: its value, the reason, and what that is from; empty without any."""
    if not parts:
        return ""
    return "\n".join(["Why each part", *map(_part, parts)])


def _part(part: LaunchPart) -> str:
    start = f"  {printable(_headed(part))}".ljust(_COLUMN)
    text = printable(f"{_reason(part)}{_evidence(part)}")
    if len(start) <= _COLUMN:
        return wrapped(text, start, " " * _COLUMN)
    return "\n".join([start.rstrip(), wrapped(text, " " * _COLUMN, " " * _COLUMN)])


def part_reason(part: LaunchPart) -> str:
    """A part with its reason and what that is from, in one line."""
    return f"{_headed(part)}: {_reason(part)}{_evidence(part)}"


def _headed(part: LaunchPart) -> str:
    if part.status in ("not set", "cannot tell"):
        return part.name
    if part.where == "wrapper":
        return part.value
    return f"{part.name}={part.value}"


def _reason(part: LaunchPart) -> str:
    was = f"was {part.present}: " if part.present and part.present != part.value else ""
    before = {
        "set": was,
        "kept": "kept: " if part.where != "script" else "",
        "not set": f"was {part.present}, " if _is_removed(part) else "not set: ",
        "by hand": f"in {_file(part)}, {was}",
        "cannot tell": "cannot tell: ",
    }
    return before[part.status] + (part.reason or "reason not known")


def _file(part: LaunchPart) -> str:
    """Where a change by hand is made: a configuration file's line is named, a script is not."""
    name = part.place.rpartition(":")[0]
    return "the script" if not name or name.endswith(".py") else name


def _evidence(part: LaunchPart) -> str:
    if not part.evidence:
        return ""
    return f" [{part.evidence}{f', {part.machine}' if part.machine else ''}]"


def change_lines(parts: Sequence[LaunchPart]) -> list[str]:
    """What the user has to change in the script, a line for each place."""
    return [
        f"change {place}: {line}" if place else f"change in the script: {line}"
        for place, line in changes_by_hand(parts)
    ]


def threads_text(parts: Sequence[LaunchPart]) -> str:
    """Variables and cores that go before the command, and why; empty without any."""
    found = [part for part in parts if part.where in ("environment", "wrapper")]
    told = [part for part in found if part.status == "set" or _is_overruled(part)]
    reasons = dict.fromkeys(f"{part.reason}{_evidence(part)}" for part in told)
    return f"{' '.join(map(_headed, told))}: {'; '.join(reasons)}" if told else ""


def _is_overruled(part: LaunchPart) -> bool:
    """Kept, although another value is recommended."""
    return part.status == "kept" and part.where == "environment" and "recommended" in part.reason


def _is_removed(part: LaunchPart) -> bool:
    """A variable that is set now, and should not be."""
    return part.status == "not set" and part.where == "environment" and bool(part.present)


def removed_text(parts: Sequence[LaunchPart]) -> str:
    """Variables whose values no library can use, and what became of them; empty without any."""
    found = filter(_is_removed, parts)
    return "; ".join(
        f"{part.name}={part.present} {part.reason.partition('; ')[0]}" for part in found
    )


def left_out_text(parts: Sequence[LaunchPart]) -> str:
    """What was considered and not set; the reasons are in the whole report."""
    found = [part for part in parts if part.status == "not set" and not _is_removed(part)]
    needless = [part.name for part in found if part.reason.startswith(NOT_NEEDED)]
    others = [part.name for part in found if not part.reason.startswith(NOT_NEEDED)]
    texts = [f"{', '.join(others)}: no gain"] if others else []
    texts += [f"{', '.join(needless)}: {NOT_NEEDED}"] if needless else []
    return "; ".join(texts)


# ---
# The launch line of a plan as a script to keep: for a shell, Slurm's sbatch, or docker run.
#
# What the plan does not know is no option, but a comment that says so.


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
    yield launch_lines(result.launch, 0, _WIDTH)


def _sbatch(result: PlanResult) -> Iterator[str]:
    yield _SHELL
    yield f"#SBATCH --job-name={_name(result)}"
    yield "#SBATCH --nodes=1"
    yield "#SBATCH --ntasks=1"
    yield from _comment(
        f"Planned for {result.gpu}: your cluster may want its own name of it, as in gpu:a100:1."
    )
    yield "#SBATCH --gres=gpu:1"
    settings, seen = _launched(result), _candidate(result)
    if settings is None:
        yield from _comment(
            "Not known: --cpus-per-task, as the DataLoader was not measured (its workers and one)."
        )
    else:
        yield from _comment(f"{count(settings.num_workers, 'worker')} and the main process.")
        yield f"#SBATCH --cpus-per-task={settings.num_workers + 1}"
    workers = ""
    if seen is not None and seen.ram_bytes:
        workers = f"; the DataLoader's workers need {size(seen.ram_bytes)} of it"
    yield from _comment(f"Not known: --mem, the main process's memory was not measured{workers}.")
    epoch = ""
    if result.speed is not None and result.speed.epoch_s is not None:
        now = result.now.batch_size
        at = f" at batch size {now}" if now else ""
        epoch = (
            f"; an epoch{at} needs at least {duration(result.speed.epoch_s)} "
            "(predicted, if the DataLoader keeps up)"
        )
    yield from _comment(f"Not known: --time, as the number of epochs is the script's{epoch}.")
    yield ""
    yield from _head(result)
    yield "set -eu"
    yield ""
    yield launch_lines(result.launch, 0, _WIDTH)


def _docker(result: PlanResult) -> Iterator[str]:
    words = shell_words(result.launch)
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
    options += [f"-e {each}" for each in variables]
    lines = ["docker run", *options, '"$IMAGE"']
    yield " \\\n  ".join(printable(line) for line in lines) + " \\"
    yield launch_lines(" ".join(words), 2, _WIDTH)


_FORMS: Final[Mapping[LaunchForm, Callable[[PlanResult], Iterator[str]]]] = {
    "sh": _sh,
    "sbatch": _sbatch,
    "docker": _docker,
}


def _shared_memory(result: PlanResult) -> list[str]:
    """Workers hand batches on through /dev/shm, of which a container has 64 MiB."""
    settings, seen = _launched(result), _candidate(result)
    if settings is not None and settings.num_workers == 0:
        return []
    if seen is None or seen.shm_bytes is None:
        return ["--ipc host"]
    # Twice as much: other jobs and larger batches come.
    return [f"--shm-size {math.ceil(max(2 * seen.shm_bytes, _DOCKER_SHM) / (1 << 20))}m"]


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
    seen = _candidate(result)
    if seen is None or not seen.shm_bytes or seen.shm_bytes < _DOCKER_SHM // 2:
        return ""
    return f"Batches in flight need {seen.shm_bytes / GIB:.2f} GiB of /dev/shm."


def _comment(text: str) -> Iterator[str]:
    yield from wrapped(printable(text), "# ", "#   ", _WIDTH).split("\n")


def _name(result: PlanResult) -> str:
    """The script's, for a queue."""
    words = [word.strip("'\"") for word in shell_words(result.command)]
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
