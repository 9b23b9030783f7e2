"""One run of a user's script, or of its DataLoader, in a process of its own: what is asked of it.

Whoever plans makes a :class:`RunSpec` of what differs from the command as it is written; whoever
starts the process completes it (target, folder, device), and the process reads it. A new kind of
run is a field here, and what heeds it in the process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Final, Literal

from trainfit.results.dataloader import StartMethod
from trainfit.results.files.decoding import Exchanged
from trainfit.results.gpus import DeviceConstants, GpuSpec
from trainfit.results.runs.measurement import Consumer
from trainfit.results.runs.trace import (
    Counted,
    ForcedAmp,
    InterventionRequest,
    LoaderCut,
    LoaderOverride,
    SampleOverride,
    Target,
)

#: Files of a run in its folder: what is asked of it, what became of it, and what was recorded.
REQUEST_FILE: Final = "request.json"
OUTCOME_FILE: Final = "outcome.json"
RECORDING_FILE: Final = "recording.trainfit"


@dataclasses.dataclass(frozen=True)
class TuningSpec:
    """How a DataLoader is measured, and its settings are chosen.

    Attributes:
        step: what happens between two batches (``None``: what is predicted for the simulated
            step).
        step_is_bound: no step is likely to be shorter than that.
        seconds: of the probe, about; a confirming run takes 20% of that.
        confirm: real runs of the chosen settings and their rivals, at most 4.
        thorough: also measure what hardly changes the choice of settings.
        max_workers: the most workers to try; by default two a core, more where batches wait.
        any_order: may batches come in another order than the sampler's (``in_order=False``)?
        ranks: processes with such a loader that share the machine.
    """

    step: Consumer | None = None
    step_is_bound: bool = False
    seconds: float = 20.0
    confirm: int = 4
    thorough: bool = True
    max_workers: int | None = None
    any_order: bool = False
    ranks: int = 1


@dataclasses.dataclass(frozen=True)
class RehearsalSpec:
    """A rehearsal of ``duration_s`` seconds, with the settings of the DataLoader that differ from
    the script's own (``None``: as the script has it)."""

    duration_s: float
    num_workers: int | None = None
    prefetch_factor: int | None = None
    pin_memory: bool | None = None
    persistent_workers: bool | None = None
    in_order: bool | None = None
    start_method: StartMethod | None = None


#: What is done with the DataLoader of a run.
LoaderTask = Literal["tune", "rehearse", "time samples"]


@dataclasses.dataclass(frozen=True)
class LoaderSpec:
    """What a run does with the DataLoader that feeds its script's first step.

    Attributes:
        tuning: how it is measured; its step is what a rehearsal has, too.
        task: what is called on it.
        rehearsal: of the task "rehearse".
        place: "module:callable" or "path/to/file.py:callable" that gives a loader, or a data set
            of which ``batch_size`` is made, in the place of a script.
        script_limit_s: for the script until its first step (``None``: most of the time limit).
        command_sets: variables that the user's command sets.
    """

    tuning: TuningSpec = TuningSpec()
    task: LoaderTask = "tune"
    rehearsal: RehearsalSpec | None = None
    place: str = ""
    batch_size: int | None = None
    script_limit_s: float | None = None
    command_sets: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class RunSpec(Exchanged):
    """One run of a user's script in a process of its own.

    Attributes:
        values: fill placeholders of the command ("amp", "grad_accum", "batch_size", …).
        variables: are set in the process when the script comes to look at its arguments, if not
            before: for what is read later, as Accelerate's are.
        force: autocast switched from outside (``None``: as the script has it).
        interventions: changes to make in the running script.
        survey: ask which interventions would apply.
        sample: what all batches are made of.
        loader: another batch size for a DataLoader.
        cut: ends epochs early, so that the script comes to what it does after one: the run ends
            when the model is trained again after an evaluation (``None``: epochs stay).
        title: what differs, in words, for the progress line.

        rank: which process of the job it is.
        company: ranks simulated with it, whose small values come to it (none: what others send is
            not known).

        steps: ends the run, if nothing does before.
        until_settled: it ends before that if memory has settled, or grows by the same with each
            step.
        only_training: it ends where an evaluation begins, after two steps or more.
        least_steps, enough_s: it ends before that with so many steps at the least, once so many
            seconds have passed since the first (``None``: it does not).
        count: what a step is: the optimizer's, a call of the model, a backward pass.
        time_limit_s: for everything; a simulated run's are its own, those left out for which others
            had the machine's cores.
        steps_limit_s: of CPU time, for its steps; other programs do not shorten it (0: none).

        gpu: what is simulated (``None``: the machine's own devices).
        constants: its memory outside the allocator (``None``: the catalogue's).
        limited: its memory is the capacity.
        cpu_stands_in: the script is told that there is a GPU, and the CPU takes its place.

        target: what Python runs (``None``: no script; see ``loading``).
        command: the launch command, for what is recorded.
        batch_size: what that says of the batch size (``None``: nothing).
        folder: where it writes.
        tells_early: what is recorded soon after the second step is saved then, too.
        look_at_samples_s: for a look at the data set's samples when it ends (0: none).
        loading: what is done with the DataLoader of the first step (``None``: nothing).
    """

    values: Mapping[str, str] = dataclasses.field(default_factory=dict)
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    force: ForcedAmp | None = None
    interventions: tuple[InterventionRequest, ...] = ()
    survey: bool = False
    sample: SampleOverride | None = None
    loader: LoaderOverride | None = None
    cut: LoaderCut | None = None
    title: str = dataclasses.field(default="", compare=False)

    rank: int = 0
    company: tuple[int, ...] = ()

    steps: int = 1
    until_settled: bool = False
    only_training: bool = False
    least_steps: int = 0
    enough_s: float | None = None
    count: Counted = "steps"
    time_limit_s: float = 600.0
    steps_limit_s: float = 0.0

    gpu: GpuSpec | None = None
    constants: DeviceConstants | None = None
    limited: bool = False
    cpu_stands_in: bool = False

    target: Target | None = None
    command: str = ""
    batch_size: int | None = None
    folder: str = ""
    tells_early: bool = False
    look_at_samples_s: float = 0.0
    loading: LoaderSpec | None = None

    def __hash__(self) -> int:
        """A hash of what differs between the runs of a plan."""
        differs = (*sorted(self.values.items()), *sorted(self.variables.items()))
        changes = (self.force, self.interventions, self.survey, self.sample, self.cut)
        return hash((differs, changes, self.rank, self.company))

    def script_and_gpu(self) -> tuple[Target, GpuSpec]:
        """The script and the simulated GPU, which every simulated run has."""
        assert self.target is not None and self.gpu is not None
        return self.target, self.gpu

    @property
    def outcome(self) -> Path:
        """The file that says what became of it; others of the run are next to it."""
        return Path(self.folder) / OUTCOME_FILE

    @property
    def recording(self) -> Path:
        """The file of what was recorded."""
        return Path(self.folder) / RECORDING_FILE

    def write(self) -> None:
        """Write it into its folder, for the process to read."""
        (Path(self.folder) / REQUEST_FILE).write_text(self.to_json())


#: The command as it is written.
AS_WRITTEN: Final = RunSpec()
