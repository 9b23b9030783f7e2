"""Detects the options of a script that are likely its tunables, where none are marked.

By name, as the field calls them (:mod:`trainfit.plan.command.options`), and by value: the option
has what the first run saw. That is an assumption, which a run has to confirm
(:mod:`trainfit.plan.runs.option_proof`).
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from trainfit.lint.imports import UnreadableError, read_files
from trainfit.plan.command.options import candidates, plain_name, tunable_of
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.precision import AmpReading, amp_readings
from trainfit.plan.command.tunables import (
    ALIASES,
    LOADER_SWITCHES,
    LOADER_TUNABLES,
    NUMBER,
    TUNABLES,
    CommandError,
    as_switch,
)
from trainfit.plan.command.words import (
    OFF,
    ON,
    OptionCandidate,
    Writing,
    said,
    write_switch,
    write_value,
    written,
)
from trainfit.plan.runs.batches import joined_by
from trainfit.plan.runs.tracing import Trace
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.generation import generated_text
from trainfit.results.runs.script import ScriptOption

# ---
# Tunables of a command as observed in a simulated run.


#: Where a batch size shows: in the DataLoader, in those of all ranks or of a step together (each
#: has its part of the batch), in what the model is called with, or in the number of rows that a
#: step's calls are given, a multiple of it (points of rays, frames of clips).
BatchSource = Literal["loader", "loaders", "calls", "rows"]


@dataclasses.dataclass(frozen=True)
class ObservedSettings:
    """Observed settings: the DataLoader's (``None``: there was none), autocast's dtype (``None``:
    off), and the micro-batches of an optimizer step (``None``: not known).

    ``loader_batch`` is the DataLoader's batch size, ``call_batch`` the first dimension of what the
    model is called with, ``call_rows`` the sum of it over a step's calls. The job has ``ranks``; a
    step joins batches of ``joined`` DataLoaders.
    """

    loader_batch: int | None = None
    call_batch: int | None = None
    loader: LoaderSettings | None = None
    autocast: str | None = None
    accumulation: int | None = None
    call_rows: int | None = None
    ranks: int = 1
    joined: int = 1

    @property
    def batch_of_all(self) -> int | None:
        """The batch size of all ranks' DataLoaders, or of all that a step joins; ``None`` where
        that is one's, too."""
        each, parts = self.loader_batch, max(self.ranks, self.joined)
        return None if each is None or parts < 2 else each * parts

    def batch(self, source: BatchSource) -> int | None:
        """The observed batch size; the rows are a multiple of it."""
        if source == "rows":
            return self.call_rows
        if source == "loaders":
            return self.batch_of_all
        return self.loader_batch if source == "loader" else self.call_batch


def observed_settings(trace: Trace) -> ObservedSettings:
    """The tunables observed in a run."""
    outcome = trace.outcome
    loader = outcome.loader
    makeup = trace.recording.makeup if trace.recording is not None else None
    calls = Counter(feed.call_samples for feed in outcome.feeds if feed.call_samples)
    rows = Counter(feed.call_rows for feed in outcome.feeds if feed.call_rows)
    text = generated_text(trace.recording) if trace.recording is not None else None
    if not calls and text is not None and text.sequences:
        calls[text.sequences] += 1
    return ObservedSettings(
        loader_batch=loader.batch_size if loader is not None else None,
        call_batch=calls.most_common(1)[0][0] if calls else None,
        loader=loader.settings if loader is not None else None,
        autocast=outcome.half,
        accumulation=makeup.accumulation if makeup is not None else None,
        call_rows=rows.most_common(1)[0][0] if rows else None,
        ranks=trace.recording.ranks if trace.recording is not None else 1,
        joined=joined_by(trace),
    )


#: A name that says the size of one batch: not how many ("num_batches"), nor after how many.
_BATCH: Final = re.compile(r"batch(?!es|_?norm|_?idx|_?index|_?num)|(?:^|_)bsz?(?:_|$)")
_NO_SUCH: Final = "the script has no such option"
#: Packages that bring a script no options, and read none from a file.
_WITHOUT_OPTIONS: Final = sys.stdlib_module_names - {
    *("configparser", "csv", "importlib", "json", "pickle", "runpy", "shelve", "sqlite3"),
    *("tomllib", "xml"),
} | {"torch", "torchvision", "torchaudio", "numpy", "PIL", "tqdm", "matplotlib"}
#: The prefetch factor of a DataLoader that was told none and has workers.
_PREFETCH: Final = LoaderSettings(1).prefetch_factor


@dataclasses.dataclass(frozen=True)
class FoundOption:
    """An option that very likely is the tunable ``name``; ``shown`` is how the user knows it.

    ``present`` is its value, ``writing`` how the command says others. ``other_amp`` and ``float16``
    are those of :class:`Command`. ``source`` is where the batch size showed.
    """

    name: str
    shown: str
    present: str
    writing: Writing
    other_amp: str | None = None
    float16: str | None = None
    source: BatchSource = "loader"
    is_proven: bool = False
    """A run has shown that it has the effect of its name."""


@dataclasses.dataclass(frozen=True)
class LeftOption:
    """An option that is named like the tunable ``name`` and is left alone, with the reason."""

    name: str
    shown: str
    reason: str


@dataclasses.dataclass(frozen=True)
class CommandOptions:
    """``command``, in which ``found`` options are tunables, instead of ``base``, the user's; and
    what was ``left`` alone."""

    base: Command
    command: Command
    found: tuple[FoundOption, ...] = ()
    left: tuple[LeftOption, ...] = ()

    def without(self, refused: Mapping[str, str]) -> CommandOptions:
        """The same options without some tunables, each with the reason."""
        options = tuple(each for each in self.found if each.name not in refused)
        left = [
            LeftOption(each.name, each.shown, refused[each.name])
            for each in self.found
            if each.name in refused
        ]
        return CommandOptions(
            self.base, with_options(self.base, options), options, (*self.left, *left)
        )

    def of_loader(self) -> CommandOptions:
        """The same options with those alone that set the DataLoader."""
        options = tuple(each for each in self.found if each.name in LOADER_TUNABLES)
        left = tuple(
            left_option for left_option in self.left if left_option.name in LOADER_TUNABLES
        )
        return CommandOptions(self.base, with_options(self.base, options), options, left)

    @property
    def proven_command(self) -> Command:
        """The command with those tunables alone that a run has shown to be some."""
        return with_options(self.base, [each for each in self.found if each.is_proven])

    def proven(self, names: Collection[str]) -> CommandOptions:
        """The same options, with these as proven."""
        found = tuple(
            dataclasses.replace(each, is_proven=each.is_proven or each.name in names)
            for each in self.found
        )
        return dataclasses.replace(self, found=found)

    def option(self, name: str) -> FoundOption | None:
        """The option for a tunable; ``None`` where there is none, or the user marked it."""
        return next((each for each in self.found if each.name == name), None)


def read_options(
    command: Command, options: Sequence[ScriptOption], observed: ObservedSettings
) -> CommandOptions:
    """The tunables of ``command`` that its user has not marked, from the ``options`` that its run
    knew and what that saw."""
    all_options = candidates(command, options)
    found: list[FoundOption] = []
    left: list[LeftOption] = []
    for name in TUNABLES:
        if name in command.present:
            continue
        read = _amp(command, all_options, observed) if name == "amp" else None
        if name != "amp":
            read = _option(command, name, _named(all_options, name), observed)
        if name == "batch_size" and not isinstance(read, FoundOption):
            read = _option(command, name, _sounding(all_options, observed), observed) or read
        if isinstance(read, FoundOption):
            found.append(read)
        elif read is not None:
            left.append(read)
    return CommandOptions(command, with_options(command, found), tuple(found), tuple(left))


def size_option(
    command: Command, options: Sequence[ScriptOption], name: str
) -> FoundOption | LeftOption:
    """The option of ``command`` that is the whole number ``name``, by its name or an alias of it;
    raises nothing: what is left alone says why."""
    named = [
        candidate
        for candidate in candidates(command, options)
        if any(
            _size_name(spelled) == name
            for spelled in (*candidate.option.flags, candidate.option.name)
        )
    ]
    shown = ", ".join(candidate.shown for candidate in named)
    whole = [candidate for candidate in named if NUMBER.fullmatch(candidate.option.value or "")]
    if not named:
        return LeftOption(name, "", _NO_SUCH)
    if not whole:
        return LeftOption(
            name, shown, f"its value is {named[0].option.value!r}, not a positive integer"
        )
    chosen = _only(whole, lambda each: each.place is not None)
    if chosen is None:
        return LeftOption(name, shown, "several options have this meaning")
    text = said(command, chosen) or str(chosen.option.value)
    return FoundOption(name, chosen.shown, text, write_value(command, chosen, name, text))


def require_named(command: Command, name: str) -> None:
    """Raise :class:`CommandError` where the script's files tell before any run that ``name`` is no
    option of it: all that it imports is its own, PyTorch's or Python's, none of which reads a file
    with options, and none of its words is a file."""
    if command.kind != "script" or name in command.present:
        return
    try:
        files, unread = read_files(Path(command.name))
    except UnreadableError:
        return
    foreign = set().union(*(file.foreign for file in files))
    text = "\n".join(line for file in files for line in file.source.lines)
    named = (word for word in command.words if word != command.name)
    if unread or foreign - _WITHOUT_OPTIONS or "exec(" in text or any(map(os.path.isfile, named)):
        return
    spelled = {name, *(alias for alias, usual in ALIASES.items() if usual == name)}
    plain = f"{text} {' '.join(command.words)}".replace("-", "_")
    if not any(re.search(rf"(?<!\w)_*{alias}(?!\w)", plain) for alias in spelled):
        raise no_such_option(name, LeftOption(name, "", _NO_SUCH))


def no_such_option(name: str, option: LeftOption) -> CommandError:
    """Why ``name`` cannot be solved for."""
    text = f" ({option.shown})" if option.shown else ""
    return CommandError(
        f"--solve {name}: {option.reason}{text}; mark the value in the command, "
        f"as in --{name.replace('_', '-')} {{{name}:512}}"
    )


def _size_name(option: str) -> str:
    plain = re.split(r"[./]", option.lstrip("+~-").replace("-", "_"))[-1]
    return ALIASES.get(plain.lower(), plain)


def with_options(command: Command, options: Iterable[FoundOption]) -> Command:
    """``command`` with these tunables in its words; as it is at their current values."""
    options = list(options)
    if not options:
        return command
    amp = next((option for option in options if option.name == "amp"), None)
    filled = written(command, {option.name: option.writing for option in options})
    return dataclasses.replace(
        filled,
        present={**command.present, **{option.name: option.present for option in options}},
        supposed=command.supposed | {option.name for option in options},
        other_amp=command.other_amp if amp is None else amp.other_amp,
        float16_amp=command.float16_amp if amp is None else amp.float16,
    )


def _named(options: Sequence[OptionCandidate], name: str) -> list[OptionCandidate]:
    return [
        option
        for option in options
        if any(
            tunable_of(spelled) == name
            for spelled in (*option.option.flags, *option.option.off, option.option.name)
        )
    ]


def _sounding(
    options: Sequence[OptionCandidate], observed: ObservedSettings
) -> list[OptionCandidate]:
    """The options with "batch" in a name of their own (``--sub-batch-size``) that have the very
    value that was seen."""
    return [
        option
        for option in options
        if any(
            _BATCH.search(plain_name(name)) for name in (*option.option.flags, option.option.name)
        )
        and _source(option.option.value, observed) not in (None, "rows")
    ]


def _option(
    command: Command, name: str, named: Sequence[OptionCandidate], observed: ObservedSettings
) -> FoundOption | LeftOption | None:
    if not named:
        return None
    shown = ", ".join(candidate.shown for candidate in named)
    agreeing = [candidate for candidate in named if _agrees(name, candidate.option.value, observed)]
    if name == "batch_size":  # what was seen itself goes before what rows are a multiple of
        plain = [each for each in agreeing if _source(each.option.value, observed) != "rows"]
        agreeing = plain or agreeing
    if not agreeing:
        values = ", ".join(f"{candidate.shown} is {candidate.option.value}" for candidate in named)
        return LeftOption(name, shown, f"{values}; {_what_was_seen(name, observed)}")
    chosen = _only(agreeing, lambda each: each.place is not None)
    if chosen is None:
        return LeftOption(name, shown, "several options have the observed value")
    write = _boolean if name in LOADER_SWITCHES else _number
    return write(command, name, chosen, observed)


def _only(
    options: Sequence[OptionCandidate], is_given: Callable[[OptionCandidate], bool]
) -> OptionCandidate | None:
    """The one of them, or the only one that the command says."""
    if len(options) == 1:
        return options[0]
    given = [option for option in options if is_given(option)]
    return given[0] if len(given) == 1 else None


def _agrees(name: str, value: str | None, observed: ObservedSettings) -> bool:
    """Is an option's value what the run saw?"""
    if name == "batch_size":
        return _source(value, observed) is not None
    if name == "grad_accum":
        return value is not None and value == str(observed.accumulation)
    loader = observed.loader
    if loader is None:
        return False
    if name == "prefetch_factor":
        if value is None or value == "None":
            value = str(_PREFETCH)
        # Without workers a script must leave it out.
        return value == str(loader.prefetch_factor) or not loader.num_workers
    if name in LOADER_SWITCHES:
        is_on = as_switch(value)
        if name == "persistent_workers" and not loader.num_workers:
            return is_on is not None
        return is_on is not None and is_on == getattr(loader, name)
    return value == str(loader.num_workers)


def _source(value: str | None, observed: ObservedSettings) -> BatchSource | None:
    """The place where a run showed the batch size ``value``; ``None``: nowhere.

    A DataLoader that gives one ready-made batch at a time leaves it to the input of the model.
    """
    if value is None:
        return None
    if value == str(observed.loader_batch):
        return "loader"
    if value == str(observed.batch_of_all):
        return "loaders"
    if observed.loader_batch not in (None, 1):
        return None
    if value == str(observed.call_batch):
        return "calls"
    return "rows" if is_part_of_rows(value, observed) else None


def is_part_of_rows(value: str, observed: ObservedSettings) -> bool:
    """May the rows that a step's calls were given be a batch of ``value``, several for each?"""
    number = int(value) if NUMBER.fullmatch(value) else 0
    return bool(number and observed.call_rows and observed.call_rows % number == 0)


def _what_was_seen(name: str, observed: ObservedSettings) -> str:
    if name == "grad_accum":
        what = (
            observed.accumulation if observed.accumulation is not None else "an unknown number of"
        )
        return f"a step has {what} micro-batches"
    if name == "batch_size" and observed.loader_batch is None:
        return f"the model is called with {observed.call_batch}"
    if observed.loader is None:
        return "no DataLoader fed the first step"
    value = observed.loader_batch if name == "batch_size" else getattr(observed.loader, name)
    if name == "prefetch_factor" and not observed.loader.num_workers:
        value = None
    return f"the DataLoader has {value}"


def _number(
    command: Command, name: str, option: OptionCandidate, observed: ObservedSettings
) -> FoundOption | LeftOption:
    text = said(command, option) or str(option.option.value)
    unset = name == "prefetch_factor" and text == "None"
    if not unset and NUMBER.fullmatch(text) is None:
        return LeftOption(name, option.shown, f"{text!r} is not an integer")
    if option.option.choices:
        return LeftOption(name, option.shown, "it accepts certain values only")
    writing = write_value(command, option, name, text)
    source = _source(option.option.value, observed) or "loader"
    return FoundOption(name, option.shown, text, writing, source=source)


def _boolean(
    command: Command, name: str, option: OptionCandidate, observed: ObservedSettings
) -> FoundOption | LeftOption:
    del observed
    writing = write_switch(command, option, {ON: True, OFF: False})
    if writing is None:
        to = "off" if as_switch(option.option.value) else "on"
        return LeftOption(name, option.shown, f"the command line cannot switch it {to}")
    present = ON if as_switch(option.option.value) else OFF
    return FoundOption(name, option.shown, present, writing)


def _amp(
    command: Command, options: Sequence[OptionCandidate], observed: ObservedSettings
) -> FoundOption | LeftOption | None:
    readings = amp_readings(command, options)
    if not readings:
        return None
    shown = ", ".join(dict.fromkeys(reading.shown for reading in readings))
    agreeing = [reading for reading in readings if reading.agrees(observed.autocast)]
    if not agreeing:
        now = ", ".join(f"{reading.shown} says {reading.now}" for reading in readings)
        return LeftOption("amp", shown, f"{now}; autocast was {observed.autocast or 'off'}")
    chosen = _only_reading(agreeing)
    if chosen is None:
        return LeftOption("amp", shown, "several options match the observed precision")
    return FoundOption(
        "amp", chosen.shown, chosen.present, chosen.writing, chosen.opposite, chosen.float16
    )


def _only_reading(readings: Sequence[AmpReading]) -> AmpReading | None:
    if len(readings) == 1:
        return readings[0]
    given = [reading for reading in readings if reading.given]
    return given[0] if len(given) == 1 else None
