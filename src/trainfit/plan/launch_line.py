"""The launch command: the user's with recommended values, variables and cores before it."""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final

from trainfit.hardware.machine.limits import misread
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tasks import MPI_PROGRAMS
from trainfit.plan.command.tunables import loader_values
from trainfit.plan.sizing.recommendation import accumulation_for
from trainfit.results.loader import CoreAdvice, LoaderResult, VariableAdvice
from trainfit.results.plan import PlanResult
from trainfit.results.speed import DataLoading
from trainfit.results.text import line_of

#: numactl's options that choose cores; with others it only places memory.
_CHOOSES_CORES: Final = ("-C", "-N", "--physcpubind", "--cpunodebind")


@dataclasses.dataclass(frozen=True)
class LaunchCommand:
    """The user's ``command`` as it is launched, with ``values`` in its placeholders: its ``words``
    for bash, and what became of its parts.

    ``found`` is what is known of its DataLoader, with the settings that are launched (``None``:
    nothing). ``kept`` are variables of the command that stay although another value is recommended,
    by name; ``useless`` are variables of the job that hold no number of threads, with what their
    values do; ``removed`` those of them that are left out. ``own_cores`` is the program of the
    command that chooses cores already ("taskset"; empty: none does). ``notes`` say both, and what
    of the command was replaced or left out.
    """

    command: Command
    values: Mapping[str, str]
    words: tuple[str, ...]
    kept: Mapping[str, str] = dataclasses.field(default_factory=dict)
    own_cores: str = ""
    notes: tuple[str, ...] = ()
    useless: Mapping[str, str] = dataclasses.field(default_factory=dict)
    removed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    found: LoaderResult | None = None

    @property
    def line(self) -> str:
        """The line for bash."""
        return line_of(self.words)


def launch(
    command: Command,
    values: Mapping[str, str],
    variables: Mapping[str, str] | None = None,
    advice: Sequence[VariableAdvice] = (),
    cores: CoreAdvice | None = None,
    useless: Mapping[str, str] | None = None,
    instead: Mapping[str, str] | None = None,
) -> LaunchCommand:
    """``command`` with ``values``; before it ``variables``, those of ``advice`` that belong into
    the environment, and ``cores``.

    Variables ``instead`` take the place of the command's own. What else it sets itself is kept,
    unless it was measured to be slower than the advice, or holds no number of threads. Such
    variables for which there is no advice are ``useless``, with what their values do
    (:func:`useless_variables`).
    """
    useless, instead = useless or {}, instead or {}
    own = command.environment(**values)
    advised = [each for each in advice if each.where == "environment"]
    wanted = {**(variables or {}), **instead, **{each.name: each.value for each in advised}}
    differing = {name for name, value in wanted.items() if own.get(name, value) != value}
    slower = (
        {each.name for each in advised if (each.gain or 0.0) > 1} | set(misread(own)) | set(instead)
    )
    others = {name: wanted[name] for name in differing & slower}
    words = command.fill(**values)
    assigned = {
        assignment: words[assignment].partition("=")[0] for assignment in command.assignments_at
    }
    gone = [at for at, name in assigned.items() if name in useless]
    for at, name in assigned.items():
        if name in others:
            words[at] = f"{name}={others[name]}"
    # A launcher's own setting (torchrun's OMP_NUM_THREADS) gives way to one in its environment.
    missing = {name for name in wanted if name not in own} | set(others) - set(assigned.values())
    before = [f"{name}={value}" for name, value in wanted.items() if name in missing]
    removed = {name: useless[name] for at, name in assigned.items() if at in gone}
    gone += _bare_env(command, words, gone)
    at = _behind_assignments(command)
    prefix = cores.prefix.split() if cores is not None else []
    present = _chooses_cores(words[: command.program_at])
    notes = [
        f"{name}={own[name]} of the command is kept; recommended is {wanted[name]}"
        for name in wanted
        if name in differing - slower
    ]
    notes += [
        f"{name}={own[each.name]} of the command is replaced by {each.value}: {each.reason}"
        for each in advised
        if (name := each.name) in others
    ]
    if prefix and present:
        notes.append(f"the command's own {present} is kept; recommended is {' '.join(prefix)}")
    prefix = [] if present else prefix
    notes += [
        f"{name}={own[name]} of the command is left out: it {what}"
        for name, what in removed.items()
    ]
    kept = [word for index, word in enumerate(words) if index < at and index not in gone]
    rest = [word for index, word in enumerate(words) if index >= at and index not in gone]
    words = [*before, *kept, *prefix, *rest]
    return LaunchCommand(
        command,
        values,
        tuple(words),
        {name: own[name] for name in differing - slower},
        present,
        tuple(notes),
        useless,
        removed,
    )


def launched(
    command: Command,
    values: Mapping[str, str],
    variables: Mapping[str, str],
    result: LoaderResult | None,
) -> LaunchCommand:
    """``command`` with what was ``result`` of its DataLoader (``None``: nothing was)."""
    advice, cores = ((), None) if result is None else (result.variables, result.cores)
    if command.processes > 1:  # which cores each process has is its launcher's matter
        cores = None
    made = launch(command, values, variables, advice, cores, useless_variables(command, result))
    return dataclasses.replace(made, found=result)


def launch_command(plan: PlanResult, command: Command) -> LaunchCommand:
    """``command`` as ``plan`` recommends it; of its DataLoader what there is."""
    loader_result = launched_loader(plan.loading)
    return launched(
        command, launch_values(plan, command, loader_result), plan.variables, loader_result
    )


def launched_loader(loading: DataLoading | None) -> LoaderResult | None:
    """What was found of the DataLoader, with the settings that are launched as recommended.

    Which cores suit is told of this machine alone.
    """
    if loading is None or loading.result is None:
        return None
    if loading.launched is None:
        return loading.result
    return dataclasses.replace(loading.result, recommended=loading.launched, cores=None)


def launch_values(
    plan: PlanResult, command: Command, result: LoaderResult | None
) -> Mapping[str, str]:
    """What the command's placeholders are filled with."""
    values: dict[str, str] = {}
    best, choice = plan.chosen.recommended_batch, plan.amp_choice
    if "batch_size" in command.present and best:
        values["batch_size"] = str(best)
    present, by_noise = plan.now.batch_size, plan.chosen.by_noise
    values |= accumulation_for(command, plan.step, present, best, by_noise).values
    if "amp" in command.present and choice is not None and choice.value is not None:
        values["amp"] = choice.value
    if result is not None:
        values |= launched_settings(command, result)
    return values


def launched_settings(command: Command, result: LoaderResult) -> dict[str, str]:
    """What is written into the DataLoader's placeholders; nothing that PyTorch refuses where the
    number of workers stays 0 because the command has no placeholder for it."""
    values = loader_values(command.present, result.recommended)
    if "num_workers" not in command.present and not result.present.num_workers:
        for name in ("prefetch_factor", "persistent_workers"):
            values.pop(name, None)
    return values


def renamed(command: Command, word: str, other: str) -> Command:
    """``command`` with ``other`` for ``word`` where that is an argument, or the value of one."""
    name = re.compile(rf"(?<![\w./-]){re.escape(word)}(?![\w./-])")
    words = tuple(name.sub(lambda _: other, each) for each in command.words)
    return dataclasses.replace(command, words=words)


def useless_variables(command: Command, result: LoaderResult | None) -> dict[str, str]:
    """Variables of the job that hold no number of threads, with what their values do, in words
    that follow the variable; without those that ``result`` gives a value."""
    advised = () if result is None else [variable.name for variable in result.variables]
    said = misread({**os.environ, **command.environment()})
    return {name: what for name, what in said.items() if name not in advised}


def _bare_env(command: Command, words: Sequence[str], gone: Collection[int]) -> list[int]:
    """Places of ``env`` that are left with nothing to do, as all its variables are ``gone``."""
    indices = []
    for index in range(command.program_at):
        if index in command.assignments_at or Path(words[index]).name != "env":
            continue
        behind = index + 1
        while behind in gone:
            behind += 1
        has_more = behind in command.assignments_at or words[behind].startswith("-")
        if behind > index + 1 and not has_more:
            indices.append(index)
    return indices


def _behind_assignments(command: Command) -> int:
    """The place at which a program may be put before the user's: behind what the shell itself
    assigns, and behind srun and mpirun, whose tasks do not have the cores of these themselves."""
    at = 0
    for begin, end in command.prefix.wrappers_at:
        if Path(command.words[begin]).name in ("srun", *MPI_PROGRAMS):
            at = end
    while at in command.assignments_at:
        at += 1
    return at


def _chooses_cores(words: Sequence[str]) -> str:
    """The wrapper that chooses cores already ("taskset"); empty where there is none."""
    for index, word in enumerate(words):
        name = Path(word).name
        if name == "taskset":
            return name
        if name == "numactl" and any(
            other.partition("=")[0].startswith(_CHOOSES_CORES) for other in words[index + 1 :]
        ):
            return name
    return ""
