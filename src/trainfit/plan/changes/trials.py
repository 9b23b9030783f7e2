"""Trials on a job, of remedies, the allocator's settings and gradients: what runs, and the
instructions.

What remedies can save is told before they are simulated: one at most, several together about.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Final

from trainfit.memory.affine import AffineStream
from trainfit.memory.peak import by_kind, moment
from trainfit.memory.replay import Stream
from trainfit.plan.changes.amp import AmpSetting
from trainfit.plan.changes.by_options import BY_OPTIONS, NEEDS, switched_on
from trainfit.plan.changes.catalogue import BY_NAME, RemedyKind, instructions
from trainfit.plan.command.parsing import Command
from trainfit.plan.command.tunables import FRAMEWORKS
from trainfit.plan.command.wrappers import ACCELERATE, PRECISIONS
from trainfit.plan.launch_line import launch, renamed
from trainfit.plan.runs.failures import NotSimulated, ScriptError, what_happened
from trainfit.plan.runs.tracing import Trace, recording_of
from trainfit.plan.sizing.memory_model import MemoryModel
from trainfit.plan.sizing.planned_job import PlannedJob
from trainfit.results.changes import AllocatorTrial, Remedy
from trainfit.results.memory import MemoryFigures
from trainfit.results.plan import Inference
from trainfit.results.runs.spec import AS_WRITTEN, RunSpec
from trainfit.results.runs.steps import StepMakeup
from trainfit.results.runs.trace import Applicability, InterventionRequest
from trainfit.results.text import size
from trainfit.simgpu.allocator.settings import VARIABLE, AllocatorSettings, knows, variables_read

#: Bytes of allocated memory at its peak, by kind (:data:`trainfit.results.runs.recording.KINDS`).
Kinds = Mapping[str, int]

_BATCH: Final = ("activation", "temporary", "input", "kv_cache", "workspace")
_GRAPH: Final = ("activation", "temporary", "kv_cache", "workspace")
#: Remedies that are about the optimizer's states.
FEWER_STATES: Final = ("optimizer-8bit", "paged-optimizer", "adafactor", "adam", "momentum", "sgd")
#: What each remedy makes less of; those that are not named may lower anything.
_LOWERS: Final[Mapping[str, tuple[str, ...]]] = {
    **dict.fromkeys(("amp-bf16", "amp-fp16"), _BATCH),
    **dict.fromkeys(("accumulate", "lower-resolution", "fewer-cameras"), _BATCH),
    **dict.fromkeys(("shorter-sequences", "fewer-generations", "shorter-completions"), _BATCH),
    "reference-logprobs": (*_GRAPH, "parameter", "buffer"),
    "freeze-backbone": (*_GRAPH, "gradient", "optimizer_state"),
    **dict.fromkeys(("checkpoint", "inplace", "no-grad-eval", "channels-last"), _GRAPH),
    **dict.fromkeys(("attention-weights", "fused-attention", "chunked-loss"), _GRAPH),
    "set-to-none": ("gradient",),
    "optimizer-in-backward": ("gradient",),
    "fused-optimizer": (),
    **dict.fromkeys(FEWER_STATES, ("optimizer_state",)),
}
#: Those that change the optimizer's step, whose temporaries count where the peak is in it.
_OPTIMIZERS: Final = (*FEWER_STATES, "fused-optimizer", "optimizer-in-backward", "set-to-none")
#: What lowers activations and changes nothing that is learned, first what lowers most of them.
_WITH_ADAPTERS: Final = ("checkpoint", "chunked-loss", "accumulate")
#: Remedies in a combination: more lines than these nobody changes at once.
_MOST_TOGETHER: Final = 4
#: Combinations that are simulated at most.
_MOST_COMBINATIONS: Final = 3


def most_saved(name: str, kinds: Kinds, phase: str) -> int:
    """Bytes of the peak of ``kinds``, in ``phase`` of the step, that a remedy can save at most.

    At that moment of the changed job there is at least what it does not lower; so its peak is no
    less than that.
    """
    lowered = _LOWERS.get(name)
    if lowered is None:
        return sum(kinds.values())
    if phase == "optimizer" and name in _OPTIMIZERS:
        lowered = (*lowered, "temporary")
    return sum(kinds.get(kind, 0) for kind in lowered)


@dataclasses.dataclass(frozen=True)
class Before:
    """The job as it is: its peak by kind, and its figures."""

    kinds: Kinds
    figures: MemoryFigures


def expected_bytes(
    before: Before,
    items: Mapping[str, Remedy],
    kinds: Mapping[str, Kinds],
    names: Sequence[str],
) -> int:
    """Bytes of device memory of the remedies ``names`` together, about.

    Of each kind of memory each leaves the share that it left alone: two that lower activations to a
    quarter leave a sixteenth, and one more of the optimizer's states its own share of these.
    ``kinds`` are the peaks with each remedy alone. Reserved memory is to allocated as with the one
    of them that packs best, where they are settings of the allocator, else as before.
    """
    allocated = 0.0
    for kind in {*before.kinds, *(kind for name in names for kind in kinds[name])}:
        now = before.kinds.get(kind, 0)
        left = [kinds[name].get(kind, 0) for name in names]
        if now:
            allocated += now * math.prod(each / now for each in left)
        else:  # the peak has moved to where there is some of it
            allocated += max(left)
    packing = before.figures.reserved_bytes / max(before.figures.allocated_bytes, 1)
    for name in names:
        figures = items[name].memory
        if items[name].status == "replayed" and figures is not None:
            packing = min(packing, figures.reserved_bytes / max(figures.allocated_bytes, 1))
    context = before.figures.device_bytes - before.figures.reserved_bytes
    return round(allocated * packing) + context


def combinations(
    wins: Sequence[Remedy],
    expected: Callable[[Sequence[str]], int],
    capacity_bytes: int,
) -> list[tuple[str, ...]]:
    """Names of remedies to try together, of those that each save something.

    The cheapest first of those whose ``expected`` bytes fit in ``capacity_bytes``, each next one
    expected to need less than those before it; last what is expected to need least.
    """
    able = [
        chain
        for count in range(2, _MOST_TOGETHER + 1)
        for chain in itertools.combinations(wins, count)
        if _go_together(chain)
    ]
    if not able:
        return []
    named = {tuple(item.name for item in chain): chain for chain in able}
    bytes_of = {names: expected(names) for names in named}
    least = min(named, key=lambda names: (bytes_of[names], _price(named[names])))
    tried: list[tuple[str, ...]] = []
    for names in sorted(named, key=lambda names: (_price(named[names]), bytes_of[names])):
        maximum = bytes_of[tried[-1]] - 1 if tried else capacity_bytes
        if bytes_of[names] <= maximum and len(tried) < _MOST_COMBINATIONS:
            tried.append(names)
    return list(dict.fromkeys([*tried, least]))


def gentler(able: Collection[str], fitting: Collection[str]) -> list[tuple[str, ...]]:
    """Names of remedies to try together where only such fit alone, ``fitting``, that change the
    training: adapters on the weights as they are, with more and more of what changes nothing.

    None where adapters fit alone, or are not among the ``able`` ones.
    """
    if "lora" not in able or "lora" in fitting:
        return []
    more = [name for name in _WITH_ADAPTERS if name in able]
    return [("lora", *more[:count]) for count in range(1, len(more) + 1)]


def _price(chain: Sequence[Remedy]) -> float:
    return sum(item.cost_percent or 0.0 for item in chain)


def _go_together(chain: Sequence[Remedy]) -> bool:
    """Does none of them exclude another?"""
    taken: set[str] = set()
    for item in chain:
        kind = BY_NAME[item.name]
        if not kind.combines or kind.slots & taken:
            return False
        taken |= kind.slots
    return True


# ---
# Scripts that do not train: what they need with gradients recorded, and without.


def gradients_both_ways(job: PlannedJob) -> Inference:
    """The memory of the first run, and of the same with gradients the other way round."""
    first, memory_model = job.first, job.memory_model
    records = first.outcome.forward.with_grad > 0
    request = InterventionRequest("forward-grad", ("off" if records else "on",))
    title = "gradients off" if records else "gradients on"
    mine, others, failure = _figures(memory_model, first), None, ""
    try:
        other = job.runs.attempt(job.batch, RunSpec(interventions=(request,), title=title))
    except NotSimulated as error:
        failure = str(error)
    else:
        if other.recording is not None and other.outcome.steps >= first.outcome.steps:
            others = _figures(memory_model, other)
        else:
            failure = what_happened(other.outcome)
    return Inference(
        records_gradients=records,
        without_gradients=others if records else mine,
        with_gradients=mine if records else others,
        failure=failure,
    )


def _figures(memory_model: MemoryModel, trace: Trace) -> MemoryFigures:
    return memory_model.figures(memory_model.shown(Stream.of(recording_of(trace)))[0])


# ---
# The launched job with expandable segments and without: does the variable lower memory?


def allocator_trial(
    command: Command, memory_model: MemoryModel, chosen: AmpSetting
) -> AllocatorTrial:
    """Replay the recording of ``chosen`` at its batch size with either kind of segment."""
    stream, batch = _launched(chosen)
    settings = memory_model.settings
    other = memory_model.with_settings(
        dataclasses.replace(settings, expandable_segments=not settings.expandable_segments)
    )
    shown, fits = memory_model.shown(stream)
    changed, other_fits = other.shown(stream)
    name, present = allocator_variable(command)
    return AllocatorTrial(
        name,
        present,
        settings.expandable_segments,
        batch,
        shown.peak_reserved,
        changed.peak_reserved,
        fits,
        other_fits,
    )


def allocator_variable(command: Command) -> tuple[str, str]:
    """The variable that holds the allocator's settings, and its value (empty: it is not set).

    The one that is set and that the command's PyTorch reads, else the one that every version does.
    """
    environment = {**os.environ, **command.environment()}
    read = variables_read(command.interpreter.torch)
    name = next((each for each in read if each in environment), VARIABLE)
    return name, environment.get(name, "")


def _launched(chosen: AmpSetting) -> tuple[Stream, int | None]:
    """The stream of the recommended batch size, where a law gives it; else of the current one."""
    batches = chosen.batches
    if batches.law is not None and batches.recommended:
        return batches.law.at(batches.recommended), batches.recommended
    return Stream.of(recording_of(chosen.trace)), chosen.configuration.batch_size


#: The share of the peak that is worth a run.
_LEAST_SHARE = 0.02
#: Settings that are replayed in addition to expandable segments; the best of them is shown.
_ALLOCATORS = (
    "max_split_size_mb:128",
    "max_split_size_mb:512",
    "roundup_power2_divisions:8",
    "large_segment_size_mb:64",
)


#: Remedies that a Transformers' ``Trainer`` is told of in words that the survey found.
_OF_OPTIMIZERS: Final = (
    "optimizer-8bit",
    "adafactor",
    "sgd",
    "momentum",
    "adam",
    "fused-optimizer",
)
#: The one that has a model checkpoint its activations is called as the model's method is.
_CHECKPOINTING: Final = "activation_checkpointing"
_CHECKPOINTING_BEFORE: Final = "gradient_checkpointing"


@dataclasses.dataclass(frozen=True)
class Trial:
    """A remedy's run: how it differs, and what it would be launched with.

    ``word`` is one in the command that becomes another: a model's name.
    """

    kind: RemedyKind
    finding: Applicability
    spec: RunSpec = AS_WRITTEN
    batch: int | None = None
    amp: str | None = None
    precision: str | None = None
    allocator: str | None = None
    how: tuple[str, ...] = ()
    word: tuple[str, str] | None = None


def told_trainer(name: str, finding: Applicability) -> tuple[str, ...]:
    """What to write for a remedy where Transformers' ``Trainer`` makes the step; empty where that
    has no argument for it."""
    if name in _OF_OPTIMIZERS:
        return finding.targets
    if name != "checkpoint":
        return ()
    is_new = any(_CHECKPOINTING in target for target in finding.targets)
    checkpointing = _CHECKPOINTING if is_new else _CHECKPOINTING_BEFORE
    return (f"in the trainer's arguments: {checkpointing}=True",)


def computing_in(dtype: str, makeup: StepMakeup | None) -> tuple[str, ...]:
    """What a framework is told whose loop makes the step, for autocast; empty where the script's
    own does."""
    framework = None if makeup is None else FRAMEWORKS.get(makeup.loop)
    return () if framework is None else (framework.with_precision(dtype),)


def accumulating(makeup: StepMakeup, batch: int, parts: int) -> tuple[str, ...]:
    """What a framework is told whose loop makes the step, for a batch in so many micro-batches;
    empty where the script's own does."""
    steps = parts * (makeup.accumulation or 1)
    if makeup.loop == "Transformers":
        return (
            f"in the trainer's arguments: per_device_train_batch_size={batch // parts}, "
            f"gradient_accumulation_steps={steps}",
        )
    framework = FRAMEWORKS.get(makeup.loop)
    if framework is None:
        return ()
    told = framework.with_accumulation.replace("…", str(steps))
    if makeup.loop == "Accelerate":
        told += ", and `with accelerator.accumulate(model):` around what is done with a batch"
    return (f"batch size {batch // parts} instead of {batch}; {told}",)


def allocators_tried(present: str, torch: str) -> tuple[str, ...]:
    """Settings to replay in addition to the variable's own; PyTorch ``torch`` has them all."""
    keys = {text: text.partition(":")[0] for text in _ALLOCATORS}
    return tuple(t for t, key in keys.items() if key not in present and knows(key, torch))


class NotApplicable(Exception):
    """A remedy does not apply; the message says why."""


class Trials:
    """Makes the trials of ``job``, from its ``survey``.

    ``law`` gives every batch size (``None``: there is none), ``flipped`` is the run with autocast
    the other way round. ``stream`` is what the survey recorded, ``before`` its figures and
    ``fits`` whether that is on the GPU.
    """

    def __init__(
        self, job: PlannedJob, law: AffineStream | None, flipped: RunSpec, survey: Trace
    ) -> None:
        assert survey.recording is not None
        self._job, self._law, self._flipped = job, law, flipped
        self._torch = job.command.interpreter.torch
        self._memory_model = job.memory_model
        self._survey = survey
        self.stream = Stream.of(survey.recording)
        outcome, self.fits = job.memory_model.shown(self.stream)
        self.before = job.memory_model.figures(outcome)
        self.kinds = by_kind(survey.recording, self.stream, outcome)
        self._phase = moment(survey.recording, outcome.peak_event).phase
        self._findings = {finding.name: finding for finding in survey.outcome.findings}

    def of(self, kind: RemedyKind) -> Trial:
        """How the remedy is tried; raises :class:`NotApplicable`."""
        job = self._job
        if kind.name.startswith("amp-"):
            return self._amp(kind)
        if kind.name == "expandable-segments":
            return self._expandable(kind)
        if kind.name == "allocator-settings":
            return self._other_allocator(kind)
        if kind.name == "shorter-sequences":
            return self._shorter(kind)
        if kind.name in FEWER_STATES:
            self._require_states()
        if kind.name in BY_OPTIONS:
            return self._by_option(kind)
        finding = self._findings[kind.name]
        if not finding.applies:
            raise NotApplicable(finding.reason)
        if kind.name == "accumulate":
            return self.accumulation(kind, finding, 0)
        batch, targets = job.batch, finding.targets
        if kind.name == "fewer-generations" and batch is not None:
            if batch % 2:
                raise NotApplicable(f"a batch of {batch} completions cannot be halved")
            batch, targets = batch // 2, targets[:1]
        spec = self._variant(kind, targets)
        how = self._by_trainer(kind.name, finding) or instructions(kind, finding)
        if kind.name == "smaller-model":
            return self._smaller_model(Trial(kind, finding, spec, batch, how=how))
        return Trial(kind, finding, spec, batch, how=how)

    def _by_trainer(self, name: str, finding: Applicability, parts: int = 1) -> tuple[str, ...]:
        """What to write where Transformers' ``Trainer`` makes the step; empty where it does not, or
        has no argument for it."""
        makeup = recording_of(self._survey).makeup
        if makeup is None:
            return ()
        if name == "accumulate":
            return accumulating(makeup, self._job.batch or parts, parts)
        return told_trainer(name, finding) if makeup.loop == "Transformers" else ()

    def _smaller_model(self, trial: Trial) -> Trial:
        """The same trial by the model's name, where the command has it: that is what to change."""
        name, smaller = trial.finding.targets
        if renamed(self._job.command, name, smaller) == self._job.command:
            return trial
        return dataclasses.replace(trial, word=(name, smaller), how=("as in the command below",))

    def _shorter(self, kind: RemedyKind) -> Trial:
        """A trial of sequences half as long, where an option of the command says their length, or
        a configuration of TRL's."""
        present = self._job.command.present.get("seq_len")
        if present is None:
            found = self._findings[kind.name]
            if not found.applies:
                why = "no option of the command says how long sequences are"
                raise NotApplicable(f"{why}; {found.reason}")
            spec = self._variant(kind, found.targets)
            return Trial(kind, found, spec, self._job.batch, how=instructions(kind, found))
        if int(present) < 2:
            raise NotApplicable(f"sequences of length {present} cannot be shorter")
        values = {"seq_len": str(int(present) // 2)}
        spec = self._job.sized(RunSpec(values=values, title=kind.name))
        finding = Applicability(kind.name, True, detail=f"{values['seq_len']} instead of {present}")
        return Trial(kind, finding, spec, self._job.batch, how=instructions(kind, finding))

    def _by_option(self, kind: RemedyKind) -> Trial:
        """A trial of a remedy that an option of the command switches on."""
        values = switched_on(self._job.command, kind.name)
        if values is None:
            found = self._findings.get(kind.name)
            if found is not None and found.applies:
                return self._with_needs(kind, found)
            why = "no option of the command switches it on, or it is on"
            raise NotApplicable(why if found is None else f"{why}; {found.reason}")
        spec = self._job.sized(RunSpec(values=values, title=kind.name))
        finding = Applicability(kind.name, True)
        return Trial(kind, finding, spec, self._job.batch, how=instructions(kind, finding))

    def _with_needs(self, kind: RemedyKind, applicability: Applicability) -> Trial:
        """A trial of a remedy with what it needs in addition, where the script has none of that."""
        wanted = [(BY_NAME[name], self._findings[name]) for name in NEEDS.get(kind.name, ())]
        all_ = [(kind, applicability), *(pair for pair in wanted if pair[1].applies)]
        requests = tuple(InterventionRequest(k.name, f.targets) for k, f in all_)
        spec = self._job.sized(RunSpec(interventions=requests, title=kind.name))
        how = tuple(line for pair in all_ for line in instructions(*pair))
        return Trial(kind, applicability, spec, self._job.batch, how=how)

    def most_saved(self, kind: RemedyKind) -> int:
        """Bytes of allocated memory that it can save at most."""
        return most_saved(kind.name, self.kinds, self._phase)

    def require_share(self, kind: RemedyKind) -> None:
        """Raise :class:`NotApplicable` where what it lowers is little of the peak."""
        most, whole = self.most_saved(kind), sum(self.kinds.values())
        if most < _LEAST_SHARE * whole:
            raise NotApplicable(f"what it lowers is only {size(most)} of {size(whole)} at the peak")

    def _require_states(self) -> None:
        """Raise :class:`NotApplicable` where the optimizer's states are little of the peak, as with
        adapters."""
        states, whole = self.kinds["optimizer_state"], sum(self.kinds.values())
        if states < _LEAST_SHARE * whole:
            raise NotApplicable(
                f"the optimizer's states are only {size(states)} of {size(whole)} at the peak"
            )

    def _variant(self, kind: RemedyKind, targets: tuple[str, ...]) -> RunSpec:
        request = InterventionRequest(kind.name, targets)
        return self._job.sized(RunSpec(interventions=(request,), title=kind.name))

    def _amp(self, kind: RemedyKind) -> Trial:
        job = self._job
        present = self._survey.outcome.half
        if present is not None:
            raise NotApplicable(f"the model computes in {present} already")
        dtype = "bfloat16" if kind.name == "amp-bf16" else "float16"
        if dtype == "bfloat16" and not self._memory_model.gpu.supports_bf16:
            raise NotApplicable(f"{self._memory_model.gpu.key} does not compute in bfloat16")
        finding = Applicability(kind.name, True)
        try:
            flipped = job.runs.trace(job.batch, job.sized(self._flipped))
            is_flipped = flipped.outcome.half == dtype
        except ScriptError:
            is_flipped = False
        amp = self._flipped.values.get("amp") if is_flipped else None
        precision = PRECISIONS[dtype] if self._accelerate_asks() and amp is None else None
        how = computing_in(dtype, recording_of(self._survey).makeup) or kind.how(finding)
        if precision is not None:
            how = (f"set {ACCELERATE}={precision}, as in the command below",)
        elif amp is not None:
            how = ("as in the command below",)
        forced = RunSpec(force=dtype, title=kind.name)  # type: ignore[arg-type]
        spec = job.sized(self._flipped if is_flipped else forced)
        return Trial(kind, finding, spec, job.batch, amp=amp, precision=precision, how=how)

    def _accelerate_asks(self) -> bool:
        """Is AMP switched on by a variable, for Accelerate's precision comes from there?"""
        unset = self._survey.outcome.accelerate == "no"
        return unset and "amp" not in self._job.command.present

    def accumulation(self, kind: RemedyKind, finding: Applicability, skip: int) -> Trial:
        """A trial with the fewest micro-batches that look as if they fit, but for ``skip``."""
        batch, law = self._job.batch, self._law
        if batch is None:
            raise NotApplicable("the batch size is not known; write {batch_size:N} into it")
        splits = [k for k in range(2, batch + 1) if batch % k == 0]
        if not splits:
            raise NotApplicable("a batch of one sample cannot be split")
        if law is not None and not self.fits:
            good = [k for k in splits if self._memory_model.limited(law.at(batch // k)).fits]
            splits = good or splits[-1:]
        if skip >= len(splits):
            raise NotApplicable("no smaller micro-batch is left")
        parts = splits[skip]
        how = self._by_trainer(kind.name, finding, parts) or (
            *(instructions(kind, finding)),
            f"batch size {batch // parts} instead of {batch}; loss = loss / {parts} before "
            f"backward; step and zero_grad only after every {parts} batches",
        )
        spec = self._variant(kind, (str(parts), *finding.targets))
        loaded = batch if finding.targets else batch // parts
        return Trial(kind, finding, spec, loaded, how=how)

    # -- the allocator ---------------------------------------------------------------------

    def _expandable(self, kind: RemedyKind) -> Trial:
        if self._memory_model.settings.expandable_segments:
            raise NotApplicable("expandable segments are on already")
        return self._allocator_trial(kind, "expandable_segments:True")

    def _other_allocator(self, kind: RemedyKind) -> Trial:
        """The best of several settings, all replayed on the recording."""
        reserved: dict[str, int] = {}
        for text in allocators_tried(self._allocator()[1], self._torch):
            outcome, fits = self.memory_model_with(text).shown(self.stream)
            reserved[text] = outcome.peak_reserved if fits or not self.fits else 1 << 60
        best = min(reserved, key=lambda text: reserved[text], default=None)
        if best is None or reserved[best] >= self.before.reserved_bytes:
            tried = ", ".join(reserved) or "settings that are not set already"
            raise NotApplicable(f"none of {tried} lowers reserved memory")
        return self._allocator_trial(kind, best)

    def _allocator_trial(self, kind: RemedyKind, text: str) -> Trial:
        finding = Applicability(kind.name, True, detail=text)
        how = (f"set {self._allocator()[0]} to {self._merged(text)}, as in the command below",)
        return Trial(kind, finding, batch=self._job.batch, allocator=text, how=how)

    def _allocator(self) -> tuple[str, str]:
        """The variable that holds its settings, and its value."""
        return allocator_variable(self._job.command)

    def _merged(self, text: str) -> str:
        _, present = self._allocator()
        return ",".join(filter(None, (present.rstrip(","), text)))

    def memory_model_with(self, text: str | None) -> MemoryModel:
        if text is None:
            return self._memory_model
        settings = AllocatorSettings.from_conf(self._merged(text), self._torch)
        return self._memory_model.with_settings(settings)

    def launch(self, trials: Sequence[Trial]) -> str | None:
        """The command with the changes; ``None`` where it stays as it is."""
        command = self._job.command
        values: dict[str, str] = {}
        variables: dict[str, str] = {}
        for trial in reversed(trials):
            if trial.amp is not None:
                values["amp"] = trial.amp
            chosen = (*BY_OPTIONS, "seq_len")
            values |= {name: text for name, text in trial.spec.values.items() if name in chosen}
            if trial.batch != self._job.batch and "batch_size" in command.present:
                values["batch_size"] = str(trial.batch)
            if trial.allocator is not None:
                variables[self._allocator()[0]] = self._merged(trial.allocator)
            if trial.precision is not None:
                variables[ACCELERATE] = trial.precision
            if trial.word is not None:
                command = renamed(command, *trial.word)
        if not values and not variables and command == self._job.command:
            return None
        return launch(command, values, instead=variables).line
