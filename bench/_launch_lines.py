"""Launch lines taken apart, and the grid of settings that they are judged by."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from trainfit.plan.command.parsing import Command, parse_command, split_line
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.loader import LoaderResult, VariableAdvice
from trainfit.results.runs.trace import Target

#: What sets libraries' threads from outside (trainfit.scripts.library_threads, and OpenCV's
#: own).
THREAD_VARIABLES = (
    *("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"),
    *("NUMEXPR_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENCV_FOR_THREADS_NUM"),
)
#: Fields of a DataLoader that a launch line is judged by.
JUDGED = ("num_workers", "prefetch_factor", "pin_memory")


@dataclass(frozen=True)
class Line:
    """What a process is started with: variables, the programs before Python ("taskset -c 0"), and
    the script with its arguments."""

    variables: tuple[tuple[str, str], ...]
    wrapper: tuple[str, ...]
    python: tuple[str, ...]
    target: Target

    def with_threads(self, count: int, option: str = "") -> Line:
        """With so many threads for each library; ``option`` is the script's own for a decoder."""
        given = dict(self.variables) | dict.fromkeys(THREAD_VARIABLES, str(count))
        line = dataclasses.replace(self, variables=tuple(sorted(given.items())))
        return line.with_option(option, str(count)) if option else line

    def with_option(self, option: str, value: str) -> Line:
        """With an argument of the script's at the end, where argparse lets the last one count."""
        args = (*self.target.args, f"{option}={value}")
        return dataclasses.replace(self, target=dataclasses.replace(self.target, args=args))


def line_of(command: Command) -> Line:
    """Of a command, with its current values; raises ``ValueError`` for one of several processes."""
    if command.launcher is not None:
        raise ValueError("a launcher's line starts processes of its own, which no place here is")
    words = command.fill()
    before = [
        word
        for at, word in enumerate(words[: command.program_at])
        if at not in command.assignments_at
    ]
    return Line(
        tuple(sorted(command.environment().items())),
        tuple(before),
        (command.python, *command.python_flags),
        command.target(),
    )


def read_line(text: str) -> Line:
    """Of a line as `trainfit plan` prints it; raises ``CommandError`` or ``ValueError``."""
    return line_of(parse_command(split_line(text)))


def in_place_of(own: Line, launch: Line) -> Line:
    """The user's environment with the script and the arguments of the launch line.

    A plan may choose another batch size, too: only lines at the same one can be compared.
    """
    return dataclasses.replace(own, target=launch.target)


def grid(
    workers: Iterable[int], prefetch: Iterable[int], like: LoaderSettings
) -> list[LoaderSettings]:
    """Workers × prefetch, the other settings as in ``like``; without workers nothing is fetched
    ahead."""
    like = plain(like)
    found = []
    for count, factor in itertools.product(sorted(set(workers)), sorted(set(prefetch))):
        found.append(plain(dataclasses.replace(like, num_workers=count, prefetch_factor=factor)))
    return list(dict.fromkeys(found))


def plain(settings: LoaderSettings) -> LoaderSettings:
    """As far as it matters within an epoch, and without what the environment sets."""
    prefetch = settings.prefetch_factor if settings.num_workers else 2
    return dataclasses.replace(
        settings, prefetch_factor=prefetch, persistent_workers=False, library_threads=None
    )


def same_threads(pools: Mapping[str, int], count: int) -> bool:
    """Does every library of a process have so many threads as it is? (``pools`` are those with
    more than one.)"""
    return set(pools.values()) == {count} if pools else count == 1


def recommended(found: LoaderResult) -> LoaderSettings:
    """The settings of a launch, with calls in workers that it says are to be made by hand.

    Threads that the environment sets are the line's own matter.
    """
    settings = plain(found.recommended)
    if any(each.where == "worker_init_fn" for each in found.variables):
        threads = found.recommended.library_threads or 1
        return dataclasses.replace(settings, library_threads=threads)
    return settings


def decoder_threads(advice: Sequence[VariableAdvice]) -> str:
    """How many threads a decoder is to have, by what the script is told to change; empty: none."""
    names = ("thread_count", "num_threads", "num_ffmpeg_threads")
    return next((each.value for each in advice if each.name in names), "")


def not_said(line: LoaderSettings, wanted: LoaderSettings) -> list[str]:
    """What of the recommended settings the line itself does not bring about: to be set by hand."""
    here, there = plain(line), plain(wanted)
    return [
        f"{name}={getattr(there, name)}"
        for name in JUDGED
        if getattr(here, name) != getattr(there, name)
    ]
