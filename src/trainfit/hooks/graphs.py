"""What the graph of a loss shows of its layers: which type they compute in, and functions of the
script's own that keep their own result; whether it outlives its step. And a profiler that records
all steps."""

from __future__ import annotations

import re
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, Final

import torch
from torch.profiler import ProfilerAction

from trainfit.findings.source_code import from_here
from trainfit.hooks.held_objects import tensors_in, walk
from trainfit.hooks.provenance.cuts import FirstOfKind
from trainfit.hooks.values import only_line
from trainfit.results.runs.learning import Misuse
from trainfit.simgpu.device.user_location import is_library, locals_of
from trainfit.torch_private.autograd import forward_of, nodes_of, operands, parameters_of

#: Numbers of a model that is worth a word.
_LARGE: Final = 1_000_000
#: Dimensions of weights of images' convolutions, which compute much with few numbers.
_OF_CONVOLUTION: Final = 4
#: What a profiler does that keeps each operator; steps, and looks in a row, which show that no
#: schedule ends it.
_RECORDS: Final = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_LEAST_STEPS: Final = 64
_LOOKS: Final = 5
#: Where the node of a scaled loss is marked; it goes with the node.
_SCALED: Final = "trainfit_scaled"
#: Steps in a row of which a loss was not scaled.
_LEAST_MIXED: Final = 2
#: Steps without a use of a gradient's graph.
_LEAST_UNUSED: Final = 2
#: Where the first node of a loss is marked; steps whose losses are still there, after which it is
#: told.
_ROOT: Final = "trainfit_root"
_LEAST_KEPT: Final = 2
#: Likewise of a model's results; so many of them in a step that no pass uses, and how many are
#: looked at.
_RESULT: Final = "trainfit_result"
_LEAST_RESULTS: Final = 8
_LOOKED_AT: Final = 256


class BackwardGraphs:
    """Follows the graphs of the first backward passes."""

    def __init__(self) -> None:
        #: The line that entered autocast, and whether a layer's weights were cast by it.
        self._autocast_at: str | None = None
        #: … autocast of the CPU; whether layers are on a GPU.
        self._of_cpu_at: str | None = None
        self._is_on_gpu = False
        self._passes = 0
        self._is_cast = self._is_inside = False
        #: Is a large model trained in float64, or one of convolutions?
        self._is_double = False
        self._kept = KeptLosses()
        self._unused = UnusedResults()

    def calling(self) -> None:
        """A model is about to be called: a teacher may be what autocast is for."""
        self._is_inside = True
        self._is_cast = self._is_cast or torch.is_autocast_enabled("cuda")

    def called(self, output: Any, place: Callable[[], str | None]) -> None:
        """A model was called, at the line that ``place`` gives."""
        self._is_inside = False
        self._unused.gave(output, place)

    def begins(self, root: Any, nodes: Nodes, step: int, place: Callable[[], str | None]) -> None:
        """A backward pass from a node, over ``nodes``, is about to begin."""
        self._kept.look(root, step, place)
        if root is not None:
            self._unused.look(nodes, step)

    def entered(self, place: str | None) -> None:
        """Autocast to a type of 16 bits begins, maybe within a model."""
        self._is_cast = self._is_cast or self._is_inside
        self._autocast_at = self._autocast_at or place or ""

    def entered_for_cpu(self, place: str | None) -> None:
        """Autocast of the CPU's operators begins."""
        self._of_cpu_at = self._of_cpu_at or place or ""

    def found(self, grows: bool = False) -> Iterator[Misuse]:
        """Autocast without effect, a model in float64, results of a model whose graph nothing
        uses, and losses that are kept with theirs; none of the last where what is known to
        ``grows`` keeps them."""
        if (place := self._autocast_in_vain()) is not None:
            yield Misuse.of("autocast_in_vain", place=place)
        if (place := self._autocast_of_cpu()) is not None:
            yield Misuse.of("autocast_of_cpu", place=place)
        if self._is_double:
            yield Misuse("double")
        if self._unused.found is not None:
            yield self._unused.found
        if self._kept.found is not None and not grows:
            yield self._kept.found

    def look(self, nodes: Sequence[Any]) -> None:
        """Look at the nodes of a loss."""
        parameters = parameters_of(nodes)
        weights = [parameter for parameter in parameters if parameter.dim() > 1]
        if weights and all(parameter.dtype == torch.float64 for parameter in parameters):
            is_large = sum(parameter.numel() for parameter in parameters) >= _LARGE
            self._is_double = is_large or any(weight.dim() >= _OF_CONVOLUTION for weight in weights)
        self._is_on_gpu = bool(weights) and all(weight.is_cuda for weight in weights)
        if not weights or any(weight.dtype != torch.float32 for weight in weights):
            self._is_cast = True  # by the script itself
        self._is_cast = self._is_cast or any(
            node.name().startswith("ToCopy") and _is_of_weight(node) for node in nodes
        )
        self._passes += 1

    @property
    def is_whole(self) -> bool:
        """Do all layers compute in float32, and no line enters autocast?"""
        is_entered = self._autocast_at is not None or self._of_cpu_at is not None
        return self._passes > 1 and not self._is_cast and not is_entered

    def _autocast_of_cpu(self) -> str | None:
        """The line that enters autocast of the CPU for layers that are on a GPU, and compute in
        float32; ``None``: none does."""
        is_seen = self._passes > 1 and self._is_on_gpu and not self._is_cast
        return self._of_cpu_at if is_seen and self._autocast_at is None else None

    def _autocast_in_vain(self) -> str | None:
        """The line that enters autocast, where no layer ran within it; ``None``: one did."""
        return None if self._is_cast or self._passes < 2 else self._autocast_at


def _is_of_weight(cast: Any) -> bool:
    return any(hasattr(operand, "variable") for operand in operands(cast))


def keeps_result(nodes: Iterable[Any]) -> tuple[str, str, str | None] | None:
    """A function of the script's own (torch.autograd.Function) whose context has its result as an
    attribute: both keep each other for ever. Its name, the attribute, and its line."""
    for node in nodes:
        if not isinstance(node, torch.autograd.function.BackwardCFunction):
            continue
        for name, value in vars(node).items():
            made_by: Any = value.grad_fn if isinstance(value, torch.Tensor) else None
            if made_by is node:
                code = getattr(forward_of(node), "__code__", None)
                place = None if code is None else f"{code.co_filename}:{code.co_firstlineno}"
                return type(node).__name__.removesuffix("Backward"), name, place
    return None


class SecondOrder:
    """Follows backward passes that record a graph of their own: does another one go through it?"""

    def __init__(self) -> None:
        self._made_at: str | None = None
        self._unused = 0
        self._is_used = False
        self._at = ""

    def passes(self, place: str | None) -> None:
        """A backward pass begins, or gradients are asked for; ``place``: where, if with a graph."""
        self._is_used = self._is_used or self._made_at is not None
        self._made_at = place

    def stepping(self) -> None:
        """An optimizer's step begins, which uses the gradients' numbers alone."""
        if self._made_at is not None:
            self._unused, self._at, self._made_at = self._unused + 1, self._made_at, None

    def found(self) -> Iterator[Misuse]:
        """The line that records them, where no pass ever went on in one."""
        if self._unused >= _LEAST_UNUSED and not self._is_used:
            yield Misuse.of("second_order_unused", place=self._at)


#: Gives the nodes of a graph, walked when somebody asks; ``None``: it is too large for that.
Nodes = Callable[[], list[Any] | None]


class _Mark:
    """Lives as long as the node that has it."""


class KeptLosses:
    """Follows whether losses, or what is computed of them, outlive their step with their graph."""

    def __init__(self) -> None:
        #: Of each line with a backward pass, the last of them: in which step, and the mark.
        self._passes: dict[str, list[tuple[int, weakref.ref[_Mark]]]] = {}
        self.found: Misuse | None = None

    def look(self, root: Any, step: int, where: Callable[[], str | None]) -> None:
        """A backward pass from a node is about to begin in a step; ``where`` gives its line."""
        place = where() if root is not None and self.found is None else None
        if place is None:
            return
        passes = self._passes.setdefault(place, [])
        before = [(number, ref()) for number, ref in passes if number < step]
        earlier = [mark for _, mark in before if mark is not None]
        steps = {number for number, _ in before}
        if len(steps) >= _LEAST_KEPT and len(earlier) == len(before):
            name = _holder_of(earlier)
            lines = (rf"\b{re.escape(name)}\s*(?:\+=|\.(?:append|add|extend|update)\()",)
            at = only_line(place.rpartition(":")[0], lines) if name else None
            self.found = Misuse("graphs_kept", (name,), at or place)
        mark = root.metadata.setdefault(_ROOT, _Mark())
        passes.append((step, weakref.ref(mark)))
        last = sorted({*steps, step})[-1 - _LEAST_KEPT :]
        self._passes[place] = [each for each in passes if each[0] in last]


class UnusedResults:
    """Follows results of models that are kept with their graph, which no backward pass uses: those
    of a rollout."""

    def __init__(self) -> None:
        self._given: list[tuple[weakref.ref[_Mark], str | None]] = []
        self._step = self._left = self._times = 0
        self._place: str | None = None
        self.found: Misuse | None = None

    def gave(self, output: Any, place: Callable[[], str | None]) -> None:
        """A model gave a result."""
        made = (tensor.grad_fn for tensor in tensors_in(output))
        node: Any = next((node for node in made if node is not None), None)
        if node is None or self.found is not None:
            return
        if len(self._given) >= _LOOKED_AT:
            self._given = [each for each in self._given if each[0]() is not None]
        if len(self._given) < _LOOKED_AT:
            mark = node.metadata.setdefault(_RESULT, _Mark())
            self._given.append((weakref.ref(mark), place()))

    def look(self, nodes: Nodes, step: int) -> None:
        """A backward pass over nodes is about to begin in a step. What none of a step's passes
        uses is left when the next step's first one begins."""
        if self.found is not None:
            return
        if step != self._step:
            self._times = self._times + 1 if self._left >= _LEAST_RESULTS else 0
            self._step = step
            if self._times >= _LEAST_KEPT:
                self.found = Misuse("results_unused", (str(self._left),), self._place)
                return
        self._given = [each for each in self._given if each[0]() is not None]
        self._left = 0
        if len(self._given) >= _LEAST_RESULTS:
            used = {node.metadata.get(_RESULT) for node in nodes() or ()}
            self._given = [each for each in self._given if each[0]() not in used]
            self._left = len(self._given)
            self._place = self._given[0][1] if self._given else None


def _holder_of(marks: Collection[_Mark]) -> str:
    """The variable of the script that has what leads to marked nodes; empty: none is found."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not is_library(frame.f_code.co_filename):
            for name, value in list(locals_of(frame).items()):
                for path, each in walk(value, name):
                    if path != name and _leads_to(each, marks):
                        return path.partition("[")[0]
        frame = frame.f_back
    return ""


def _leads_to(value: Any, marks: Collection[_Mark]) -> bool:
    if not isinstance(value, torch.Tensor) or value.grad_fn is None or value.numel() != 1:
        return False
    return any(node.metadata.get(_ROOT) in marks for node in nodes_of(value.grad_fn) or ())


class ScaledLosses(FirstOfKind):
    """Follows the losses that a GradScaler scales, and those of the same step that it does not."""

    def __init__(self, place: Callable[[], str | None]) -> None:
        super().__init__(place)
        self._is_scaled = False
        #: Was the scale updated since a loss was scaled last?
        self._is_updated = False
        self._times_between = 0
        self.is_enabled = True
        """Does the GradScaler scale that is asked to?"""
        self.are_gradients = False
        """Are gradients scaled now?"""
        #: Parameters that passes of losses as they are went to, by identity, with the line.
        self._plain: list[tuple[set[int], str | None]] = []
        self._times = 0
        self._is_read = False
        #: The line of a backward pass from a scaled loss.
        self._at: str | None = None

    def in_vain(self) -> Iterator[Misuse]:
        """The misuse that the loss of a model that computes in float32 only is scaled."""
        if self._at is not None:
            yield Misuse.of("scaler_in_vain", place=self._at)

    def scaled(self, losses: Any) -> None:
        """A GradScaler gave these; one that is not enabled gives what it is given."""
        if not self.is_enabled:
            return
        self._is_updated = False
        for loss in losses if isinstance(losses, list | tuple) else (losses,):
            node: Any = loss.grad_fn if isinstance(loss, torch.Tensor) else None
            if node is not None:
                node.metadata[_SCALED] = True

    def updates(self) -> None:
        """The scale is updated."""
        self._is_updated = True

    def steps(self) -> None:
        """A GradScaler makes a step: of gradients that it scaled before its last update?"""
        self._times_between += self._is_updated
        if self._times_between >= _LEAST_MIXED and self._is_updated:
            self._note("scale_updated_between")

    def read(self) -> None:
        """A script asks for the scale, to use it itself."""
        self._is_read = True
        self.are_gradients = False

    def unscaled(self) -> None:
        """The GradScaler unscaled the gradients."""
        self.are_gradients = False

    def backward(self, nodes: Sequence[Any], place: str | None) -> None:
        """A backward pass goes through these nodes, the root first."""
        if any(node.metadata.get(_SCALED) for node in nodes):
            self._is_scaled, self._at = True, self._at or place or ""
            self.are_gradients = not self._is_read
        else:
            self._plain.append(({id(parameter) for parameter in parameters_of(nodes)}, place))

    def stepping(self, tensors: Iterable[Any], *, unscaled: bool) -> None:
        """An optimizer of these tensors is about to step; a GradScaler ``unscaled`` gradients."""
        own = {id(tensor) for tensor in tensors}
        lines = [place for reached, place in self._plain if reached & own]
        is_mixed = self._is_scaled and unscaled and bool(lines) and not self._is_read
        self._times = self._times + 1 if is_mixed else 0
        if self._times >= _LEAST_MIXED:
            self._note("loss_not_scaled", place=lines[0] or "")
        self._is_scaled = self.are_gradients = False
        self._plain = []


#: How a script switches on what follows its Python code.
_SWITCHES: Final = (
    r"\btracemalloc\.start\(",
    r"\bsys\.set(?:trace|profile)\((?!\s*None)",
    r"\b(?:[cC]?[pP]rofiler?|pr|prof)\.enable\(",
)


def follower() -> tuple[str, int] | None:
    """What follows each call, line or allocation of this thread's Python code, by its name, and the
    frames that it keeps of each (0: none); ``None``: nothing does."""
    memory = sys.modules.get("tracemalloc")
    if memory is not None and memory.is_tracing():
        return "tracemalloc", int(memory.get_traceback_limit())
    for name, found in (("sys.settrace", sys.gettrace()), ("sys.setprofile", sys.getprofile())):
        if found is None or str(getattr(found, "__module__", "")).startswith("trainfit."):
            continue  # a simulated run's own
        return ("cProfile" if type(found).__module__ in ("cProfile", "_lsprof") else name), 0
    monitoring = getattr(sys, "monitoring", None)  # Python 3.12 and newer
    named = None if monitoring is None else monitoring.get_tool(monitoring.PROFILER_ID)
    return None if not named else (str(named), 0)


class Profiling:
    """Follows a profiler of the script."""

    def __init__(self) -> None:
        #: What follows its Python code at the last looks, and how many these are.
        self._followed: tuple[str, int] | None = None
        self._looks_followed = 0
        self._began: tuple[weakref.ref[Any], str | None] | None = None
        self._looks = 0
        self.all_steps: tuple[int, str | None] | None = None
        """Steps of which it has recorded each at least, and the line that began it."""

    def begins(self, profiler: Any, place: str | None) -> None:
        """A profiler begins."""
        if getattr(profiler, "enabled", True):
            self._began, self._looks = (weakref.ref(profiler), place), 0

    def found(self) -> Iterator[Misuse]:
        """A profiler that records all steps; what follows the script's Python code, the frames that
        it keeps of each, and the line that switched it on, where the main script has it."""
        if self.all_steps is not None:
            yield Misuse("profiler_on", (str(self.all_steps[0]),), self.all_steps[1])
        if self._followed is not None and self._looks_followed >= _LOOKS:
            file = getattr(sys.modules.get("__main__"), "__file__", None) or ""
            file = from_here(file) or file  # as other lines are told
            told = self._followed[0], str(self._followed[1])
            yield Misuse("tracing_on", told, only_line(file, _SWITCHES))

    def ends(self) -> None:
        """The profiler ends."""
        self._began = None

    def look(self, steps: int) -> None:
        """Note at a step whether the profiler records."""
        self._followed = follower()
        self._looks_followed = self._looks_followed + 1 if self._followed is not None else 0
        profiler = self._began[0]() if self._began is not None else None
        # The older one (torch.autograd.profiler) records as long as it is on.
        does = getattr(profiler, "current_action", ProfilerAction.RECORD)
        if profiler is None or self._began is None or does not in _RECORDS:
            # Where no step came after its end, the training was over.
            self._looks, self.all_steps = 0, None
            return
        self._looks += 1
        if self._looks >= _LOOKS and steps >= _LEAST_STEPS:
            self.all_steps = steps, self._began[1]
