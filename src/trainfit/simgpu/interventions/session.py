"""The interventions of one run: a survey of all of them, or a trial of some."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from trainfit.results.runs.trace import Applicability, Compute, ForwardCalls, InterventionRequest
from trainfit.simgpu.interventions.attention import AttentionWithoutWeights, WrittenAttention
from trainfit.simgpu.interventions.checkpointing import Checkpointing
from trainfit.simgpu.interventions.inputs import FewerCameras, LowerResolution
from trainfit.simgpu.interventions.layers import (
    ChannelsLast,
    GlobalPooling,
    InplaceActivations,
    SmallerModel,
)
from trainfit.simgpu.interventions.optimizer_step import (
    AccumulatedSteps,
    ForwardGrad,
    FreezeBackbone,
    NoGradInEvaluation,
    OptimizerInBackward,
    SetToNone,
)
from trainfit.simgpu.interventions.optimizers import (
    Adafactor,
    Adam,
    EightBit,
    Fused,
    Momentum,
    Paged,
    Sgd,
)
from trainfit.simgpu.interventions.script_state import Intervention, OperatorWatch, Scene
from trainfit.simgpu.interventions.trainers import (
    Adapters,
    ChunkedLoss,
    FewerGenerations,
    FourBits,
    ReferenceLogProbs,
    ShorterCompletions,
    ShorterSamples,
)
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation

#: In the order in which several are applied: what wraps ``optimizer.step`` last is outermost.
_KINDS: tuple[type[Intervention], ...] = (
    ReferenceLogProbs,
    FewerGenerations,
    ShorterCompletions,
    ShorterSamples,
    SmallerModel,
    GlobalPooling,
    FreezeBackbone,
    ChannelsLast,
    LowerResolution,
    FewerCameras,
    InplaceActivations,
    AttentionWithoutWeights,
    WrittenAttention,
    FourBits,
    Adapters,
    ChunkedLoss,
    Checkpointing,
    NoGradInEvaluation,
    ForwardGrad,
    SetToNone,
    Sgd,
    Momentum,
    Adam,
    Adafactor,
    EightBit,
    Paged,
    Fused,
    OptimizerInBackward,
    AccumulatedSteps,
)
_BY_NAME = {kind.name: kind for kind in _KINDS}

#: Names that a request may have.
NAMES = tuple(_BY_NAME)


class Interventions:
    """Watches a run for a survey, or changes it as requested; neither: does nothing."""

    def __init__(
        self, simulation: Simulation, requests: Sequence[InterventionRequest], survey: bool
    ) -> None:
        self._wanted = bool(requests) or survey
        self._survey = survey
        self._operators = OperatorWatch(simulation)
        self._scene = Scene(simulation, self._operators, find_models=self._wanted)
        asked = {request.name: request for request in requests}
        if unknown := sorted(set(asked) - set(_BY_NAME)):
            raise ValueError(f"unknown intervention {unknown[0]!r}")
        self._all = [
            kind(asked[kind.name].targets) if kind.name in asked else kind()
            for kind in _KINDS
            if survey or kind.name in asked
        ]

    def install(self, patches: PatchSet) -> None:
        """Apply the interventions until ``patches`` is restored."""
        self._scene.install(patches)
        self._operators.install(patches)
        for each in self._all:
            (each.watch if self._survey else each.apply)(self._scene)

    # -- outcome -------------------------------------------------------------------------

    @property
    def optimizers(self) -> int:
        """Optimizers that the script made."""
        return len(self._scene.optimizers)

    def after_call(self, callback: Callable[[torch.nn.Module, Any], None]) -> None:
        """Call ``callback`` after every call of a model, with what it gave."""
        self._scene.after_call.append(callback)

    def before_call(self, callback: Callable[[torch.nn.Module], None]) -> None:
        """Call ``callback`` before every call of a model, as the script left it: before
        :meth:`install`."""
        self._scene.on_call.append(callback)

    def forward_calls(self) -> ForwardCalls:
        return self._scene.forward_calls()

    def compute(self) -> Compute | None:
        return self._operators.steady_step()

    def findings(self) -> tuple[Applicability, ...]:
        """What each would change, after a survey; empty after a trial."""
        return tuple(_finding(each) for each in self._all) if self._survey else ()

    def changed(self) -> dict[str, int]:
        """How many things each changed, after a trial; empty after a survey."""
        return {} if self._survey else {each.name: each.changed for each in self._all}


def _finding(intervention: Intervention) -> Applicability:
    """The intervention's finding; a script too odd to be examined costs one remedy, not the
    survey."""
    try:
        return intervention.finding()
    except Exception as error:
        return intervention.no(f"it could not be examined ({type(error).__name__}: {error})")
