"""Runs a training function under interventions, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from trainfit.memory.replay import Replay, Stream, live_at, replay
from trainfit.results.runs.recording import KINDS, Recording
from trainfit.results.runs.trace import Applicability, InterventionRequest
from trainfit.simgpu import Simulation
from trainfit.simgpu.interventions import Interventions
from trainfit.simgpu.patching import PatchSet


class Run:
    """What a simulated run recorded, and what the interventions say of it."""

    def __init__(self, recording: Recording, interventions: Interventions) -> None:
        self.recording = recording
        self.stream = Stream.of(recording)
        self.replay: Replay = replay(self.stream)
        self.compute = interventions.compute()
        self.findings: dict[str, Applicability] = {f.name: f for f in interventions.findings()}
        self.changed = interventions.changed()

    @property
    def peak(self) -> int:
        """Peak of allocated memory, in bytes."""
        return self.replay.peak_allocated

    def live(self, kind: str) -> int:
        """Bytes asked for that are alive at the end, of one kind."""
        alive = live_at(self.stream, len(self.stream.events) - 1)
        chosen = self.recording.alloc_kind[alive] == KINDS.index(kind)
        return int(self.recording.alloc_bytes[alive][chosen].sum())

    def sizes(self) -> set[int]:
        """The sizes that were ever asked for."""
        return set(np.unique(self.recording.alloc_bytes).tolist())


def run(
    train: Callable[[], Any], *requests: InterventionRequest | str, survey: bool = False
) -> Run:
    """``train`` on a simulated GPU without limits; a request may be a bare name."""
    asked = [InterventionRequest(r) if isinstance(r, str) else r for r in requests]
    simulation = Simulation("custom:8GiB", limited=False)
    interventions = Interventions(simulation, asked, survey)
    patches = PatchSet()
    with simulation:
        interventions.install(patches)
        try:
            train()
            findings = Run(simulation.recording, interventions)
        finally:
            patches.restore()
    return findings


def tried(train: Callable[[], Any], name: str) -> tuple[Run, Run]:
    """The run as written, and with the one intervention that its survey found to apply."""
    before = run(train, survey=True)
    finding = before.findings[name]
    assert finding.applies, finding.reason
    return before, run(train, InterventionRequest(name, finding.targets))
