"""What ``trainfit loader`` found: what batches cost, and what to set, each with its reason."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import ClassVar, Final, Literal

from trainfit.results.dataloader import (
    Candidate,
    Confirmed,
    LoaderMachine,
    LoaderSettings,
    Probe,
    steady,
)
from trainfit.results.files.documents import Format, ResultFile
from trainfit.results.findings import Evidence, Finding, Fix
from trainfit.results.runs.script import Protection

# ---
# What to set and to change, each with its reason and evidence.


#: Who gave a variable its value: the user's command, his script (until its first batch), or the
#: shell (or whatever else started trainfit); empty: nobody.
SetBy = Literal["command", "script", "shell", ""]
#: What a reason rests on; empty: it needs none ("the script has no DataLoader").
Basis = Literal["measured", "predicted", "assumed", ""]


@dataclasses.dataclass(frozen=True)
class VariableAdvice:
    """A variable of the environment (or a call) to set, because of evidence.

    ``where`` is "environment", "worker_init_fn" or "script"; ``line`` what to write there.
    ``present`` is the variable's value now (``None``: it is not set) and ``set_by`` who set that.
    ``gain`` is what batches per second with the value are, divided by those as it is now,
    measured in real runs (``None``: these were not both made).
    """

    name: str
    value: str
    where: str
    line: str
    reason: str
    evidence: str
    present: str | None = None
    set_by: SetBy = ""
    gain: float | None = None


@dataclasses.dataclass(frozen=True)
class SettingReason:
    """One setting of a launch, with why it has its value: also one that is left as it is.

    ``name`` is what the user would search for ("num_workers", "OMP_NUM_THREADS", "CPU affinity").
    ``value`` is the recommended one and ``present`` the user's, as they are written (``None``: it
    is not set, nor is it to be); ``set_by`` is who set a variable. ``reason`` is one line, true of
    what was measured here, and ``evidence`` what it rests on. ``where`` it belongs: arguments are
    the DataLoader's. ``is_kept``: the present value stays, for this reason; ``misread`` is what
    makes a present value useless ("holds no number of threads"), which is none to keep.
    """

    name: str
    value: str | None
    present: str | None
    reason: str
    evidence: Basis
    set_by: SetBy = ""
    where: Literal["argument", "environment", "wrapper"] = "argument"
    is_kept: bool = False
    misread: str = ""


@dataclasses.dataclass(frozen=True)
class CoreAdvice:
    """Which CPUs to run on: ``prefix`` goes before the command ("taskset -c 0-7"), or is what
    starts its ranks, in the place of ``python`` ("torchrun …")."""

    prefix: str
    cpus: tuple[int, ...]
    reason: str
    evidence: str


#: Evidence of advice whose gain is predicted: the end-to-end rate with it.
RATE_WITH_IT: Final = "batches with it"


def advice_finding(
    kind: str,
    title: str,
    how: str,
    batches_per_s: float | None,
    gain: float | None,
    cause: str,
    share: float | None = None,
) -> Finding:
    """What would help beyond the settings, with its reason.

    Args:
        kind: "uint8", "fewer_tensors", "decoder_threads", "resize", "cache", "gpu_transforms",
            "frame_alignment", "in_order", …
        batches_per_s: the end-to-end rate with it; ``None`` where measured costs alone do not give
            it.
        gain: that divided by the recommended setting's.
        share: where no rate is given, the measured share that it concerns: of a batch's time, or
            for "uint8" and "fewer_tensors" of the time between batches.
    """
    rate = () if batches_per_s is None else (Evidence(RATE_WITH_IT, batches_per_s, "1/s"),)
    return Finding(kind, "info", title, rate, cause, (Fix(how, gain=gain),), "likely", share)


def most_helpful_first(advice: Iterable[Finding]) -> list[Finding]:
    """Predicted gains, the largest first; then the largest shares."""

    def order(finding: Finding) -> tuple[bool, float]:
        return finding.fix.gain is None, -(finding.fix.gain or finding.share or 0.0)

    return sorted(advice, key=order)


# ---
# What ``trainfit loader`` found: what batches cost, and the settings that suit them.
#
# Rates are batches per second of one DataLoader; times are seconds, sizes bytes. ``None`` is not
# measured, 0 is measured.


#: How figures are marked that rest on runs which other processes disturbed.
BUSY: Final = "predicted: the machine was busy"

#: What bounds the loop: "gpu" (nothing to gain), "workers" (more of them would help), "cores",
#: "disk", "transfer" (of batches to the main process), "lock" (workers wait for one another),
#: "sampler", "main_process" (num_workers=0 is all that works).
Limit = Literal[
    "gpu", "workers", "cores", "disk", "transfer", "lock", "sampler", "main_process", "unknown"
]


@dataclasses.dataclass(frozen=True)
class LoaderResult(ResultFile):
    """What ``trainfit loader`` found.

    ``command`` is the user's command, or what else was tuned. ``step_s`` is the consumer's
    step and ``step_source`` where it is from; 0 means as fast as the loader can.
    ``present`` are the script's own settings. ``recommended`` are the smallest settings within
    2% of the best predicted end-to-end rate. ``verdict``: "change", "keep" (they are as good
    as any), "nothing_to_gain" (the GPU is the limit with the current settings),
    "no_setting_helps" (what bounds is no setting), "cannot_tell".

    With several ``ranks``, ``machine`` is what one of them gets and rates are of one; real runs
    had a copy of the loader at work for each.
    """

    FILE: ClassVar = Format.of("trainfit-loader", "trainfit loader --output")
    METRICS: ClassVar = {
        "step_ms": "time of the step that the DataLoader has to keep up with",
        "loader_batches_per_s": "rate with the current settings and this step",
        "recommended_loader_batches_per_s": "the same with the recommended settings",
        "waiting_for_batches_share": "share of the time that the loop waits, current settings",
        "workers": "num_workers now",
        "recommended_workers": "num_workers as recommended",
    }

    command: str
    loader: str
    machine: LoaderMachine
    step_s: float
    step_source: str
    probe: Probe
    present: LoaderSettings
    recommended: LoaderSettings
    verdict: Literal["change", "keep", "nothing_to_gain", "no_setting_helps", "cannot_tell"]
    limit: Limit
    reason: str
    candidates: tuple[Candidate, ...]
    confirmed: tuple[Confirmed, ...]
    variables: tuple[VariableAdvice, ...] = ()
    cores: CoreAdvice | None = None
    advice: tuple[Finding, ...] = ()
    too_many: tuple[Candidate, ...] = ()
    """Beyond the knee: the same with 2 and 4 times the recommended workers."""
    faults: tuple[Finding, ...] = ()
    notes: tuple[str, ...] = ()
    save_alone_s: float | None = None
    """What saving a checkpoint (``SAVE_BYTES``) took without workers."""
    held: Probe | None = None
    """A second probe, with one thread for each library in a worker; ``None``: not made, as a
    batch starts none of their threads."""
    seconds: float = 0.0
    torch: str = ""
    step_is_bound: bool = False
    """Is ``step_s`` only the least that the step can take?"""
    launch: str = ""
    """The command with the settings that its options or placeholders say, and what ``variables``
    and ``cores`` put before it; empty where it stays as it is."""
    launch_sets: tuple[str, ...] = ()
    """Those of ``recommended`` that ``launch`` says, by their names: nothing is to be written into
    the script for them."""
    protection: Protection | None = None
    """What kept the script from changing files (``None``: not told)."""
    ranks: int = 1
    doubts: tuple[Finding, ...] = ()
    """What from outside bent the measurements: other processes ("busy_machine"; "critical": the
    verdict is the model's alone), cores slower than they can be ("slowed_cores")."""
    reasons: tuple[SettingReason, ...] = ()
    without_others: LoaderSettings | None = None
    """Where other processes disturbed the measurements: better settings than the current ones on
    this machine without them, as the model predicts by the CPU time of batches; not confirmed by
    any run. They are ``recommended`` (earlier: ``present`` was, by the verdict "cannot_tell")."""

    @property
    def was_busy(self) -> bool:
        """Is what is recommended predicted, as other processes kept the machine busy?"""
        return any(doubt.is_critical for doubt in self.doubts)

    def compared(self) -> tuple[float, float, Basis] | None:
        """:meth:`rates` of the present and of the recommended settings."""
        return self.rates(self.present, self.recommended)

    def rates(
        self, one: LoaderSettings, other: LoaderSettings
    ) -> tuple[float, float, Basis] | None:
        """Batches per second of both settings, and where both are from: "measured", or "predicted"
        where one was not run; ``None``: not known."""
        runs = self.measured(one), self.measured(other)
        if runs[0] is not None and runs[1] is not None:
            rates = runs[0].measured_batches_per_s, runs[1].measured_batches_per_s
            if rates[0] is not None and rates[1] is not None:
                return rates[0], rates[1], "measured"
        seen = self.candidate(one), self.candidate(other)
        if seen[0] is None or seen[1] is None:
            return None
        return seen[0].batches_per_s, seen[1].batches_per_s, "predicted"

    def candidate(self, settings: LoaderSettings) -> Candidate | None:
        """What the model said of these settings, if they were among the candidates."""
        wanted = steady(settings)
        return next((each for each in self.candidates if steady(each.settings) == wanted), None)

    def measured(self, settings: LoaderSettings) -> Confirmed | None:
        """The real run of these settings, if there was one that neither failed nor was disturbed by
        other processes."""
        wanted = steady(settings)
        found = (each for each in self.confirmed if steady(each.settings) == wanted)
        usable = (each for each in found if each.measured_batches_per_s is not None)
        return next((each for each in usable if not each.is_disturbed), None)

    def rate(self, settings: LoaderSettings) -> float | None:
        """Batches per second with these settings: measured where they were run, else predicted."""
        real, seen = self.measured(settings), self.candidate(settings)
        if real is not None:
            return real.measured_batches_per_s
        return seen.batches_per_s if seen is not None else None

    def quantities(self) -> Mapping[str, float | None]:
        """Quantities of :class:`Metered`; rates are measured where the settings were run."""
        real, seen = self.measured(self.present), self.candidate(self.present)
        waiting = real.waiting_share if real is not None else None
        if real is None and seen is not None:
            waiting = seen.waiting_share
        return {
            "step_ms": self.step_s or None,
            "loader_batches_per_s": self.rate(self.present),
            "recommended_loader_batches_per_s": self.rate(self.recommended),
            "waiting_for_batches_share": waiting,
            "workers": self.present.num_workers,
            "recommended_workers": self.recommended.num_workers,
        }
