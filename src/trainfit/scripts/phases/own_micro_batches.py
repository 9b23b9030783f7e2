"""Micro-batches of a loop of the script's own that are alike: of a step's many two are simulated.

A micro-batch is what a loop does up to the end of a backward pass. After two of a step that called
the same models alike and left as much memory in use, the models of the others are not called: they
give tensors like those of the second call, and the backward pass ends there. Meanwhile memory is
allocated and freed as the second call and its backward pass did it, and its kernels stand for those
that were not launched. All else that the loop does is done.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, Final

import torch
from torch.autograd.graph import increment_version

from trainfit.hooks.held_objects import walk
from trainfit.results.runs.recording import FREE, MALLOC, OTHER, STEP_END
from trainfit.scripts.phases.stand_in_calls import StandInCall, TensorOutline, state_as_it_was
from trainfit.simgpu import constructors
from trainfit.simgpu.device.recorder import BACKWARD, FORWARD
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation
from trainfit.torch_private.autograd import (
    ENGINE_RUN_BACKWARD,
    apply_function,
    node_number,
    nodes_of,
    sequence_number,
)
from trainfit.torch_private.operators import version

#: Micro-batches that are made before others follow from them: the first makes the gradients.
MADE: Final = 2
#: Bytes by which what is in use may differ when two of them begin: a sum of losses.
ALIKE_BYTES: Final = 1024
#: Calls of models in a micro-batch up to which it is looked at.
_CALLS: Final = 8
#: Paths of what a call is given: shapes and dtypes of tensors, texts and switches.
_Form = tuple[tuple[str, Any], ...]


class OwnMicroBatches:
    """Leaves out the calls of models in micro-batches that follow from those before.

    Each has one call of a model that trains, which is given nothing with a gradient, and maybe
    others of models that do not (an encoder, a reference), and one backward pass. Not with several
    processes: the last micro-batch of a step is then the one that communicates.

    Args:
        simulation: where they are made.
        repeated: gets the calls that stand for others, as
            :class:`~trainfit.results.runs.recording.RepeatedCall` has them.
    """

    def __init__(self, simulation: Simulation, repeated: list[list[int]]) -> None:
        self._simulation, self._repeated = simulation, repeated
        self._depth = self._in_backward = 0
        #: Where the call began that goes on.
        self._began: _RunMark | None = None
        self._now, self._before = _MicroBatch(), _MicroBatch()
        #: Is nothing left out up to the end of this step?
        self._is_off = False
        self._left: list[_LeftOutOfStep] = []
        self._memories: list[_RepeatedMemory] = []
        self._patches = PatchSet()

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored: then models are as they were."""
        patches.see_calls(self._enter, self._leave, with_kwargs=True)
        patches.set(*ENGINE_RUN_BACKWARD, self._passing(ENGINE_RUN_BACKWARD.now))
        self._simulation.on_step(self._step_over)
        patches.on_restore(self._restore)

    def _step_over(self, _: int) -> None:
        self._begin()
        self._is_off = False

    def _begin(self) -> None:
        self._restore()
        self._now, self._before = _MicroBatch(), _MicroBatch()

    def _restore(self) -> None:
        for step in self._left:
            step.remove()
        self._left.clear()
        self._patches.restore()

    def _give_up(self) -> None:
        """Until the next step."""
        self._begin()
        self._is_off = True

    # -- calls -----------------------------------------------------------------------------------

    def _enter(self, *_: Any) -> None:
        self._depth += 1
        if self._depth > 1 or self._in_backward or self._is_off:
            return
        self._began = _RunMark.of(self._simulation)
        if self._left and None in self._before.changed_gradients():
            self._begin()  # the script has updated the parameters itself
        if self._now.in_use is None:
            self._now.in_use = self._simulation.allocator.requested_bytes
            if self._left and not self._now.begins_like(self._before):
                self._give_up()

    def _leave(self, module: torch.nn.Module, args: Any, kwargs: Any, found: Any = None) -> None:
        """PyTorch gives a hook of all modules no ``kwargs`` where the call failed: ``None`` is in
        its place."""
        self._depth = max(0, self._depth - 1)
        if self._depth or self._began is None:
            return
        began, self._began = self._began, None
        if self._left or self._is_off or kwargs is None:
            return
        with contextlib.suppress(Exception):
            self._made(module, (args, kwargs), found, began)

    def _made(self, module: torch.nn.Module, given: Any, found: Any, began: _RunMark) -> None:
        parameters = list(module.parameters())
        form = _form(given)
        if not parameters or form is None:
            return  # a loss, say, which is made every time
        trains = torch.is_grad_enabled() and any(
            parameter.requires_grad for parameter in parameters
        )
        if len(self._now.calls) >= _CALLS or (trains and self._now.trained is not None):
            self._give_up()
            return
        result = _Result.of(found, self._simulation)
        span = _Span(began, _RunMark.of(self._simulation))
        if result is not None and trains:
            self._now.watch_gradients(result.nodes, lambda: _RunMark.of(self._simulation))
        self._now.calls.append(_MadeCall(weakref.ref(module), form, trains, result, span))

    # -- backward passes ---------------------------------------------------------------------------

    def _passing(self, run: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(run)
        def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
            counts = not self._in_backward and bool(kwargs.get("accumulate_grad"))
            if counts and not self._left and not self._is_off:
                with contextlib.suppress(Exception):
                    self._now.is_apart = not self._now.leads_only_to_results(outputs)
            versions = self._now.versions() if counts else {}
            self._now.adds = bool(versions) and versions == self._before.gradients
            self._in_backward += 1
            try:
                return run(outputs, *args, **kwargs)
            finally:
                self._in_backward -= 1
                if counts:
                    self._now.gradients = self._now.versions()
                    self._now.note_changed(versions)
                    self._passed()

        return run_backward

    def _passed(self) -> None:
        """A micro-batch is over."""
        for memory in self._memories:
            memory.finish()
            # Whoever looks whether a pass has added to a gradient sees that one did.
            increment_version(
                [each for each in self._before.changed_gradients() if each is not None]
            )
        self._memories.clear()
        now, self._now = self._now, _MicroBatch()
        if self._left or self._is_off:
            return
        back = now.back
        now.forget_graph()
        is_alike = now.adds and now.is_like(self._before)
        now.alike = self._before.alike + 1 if is_alike else 1
        if now.trained is None or now.is_apart or back is None or _has_processes():
            self._give_up()
            return
        self._before = now
        if now.alike >= MADE:
            self._leave_out(now, _Span(back, _RunMark.of(self._simulation)))

    def _leave_out(self, now: _MicroBatch, back: _Span) -> None:
        """The next ones are like the last: their calls are left out, if as much is in use."""
        recorder = self._simulation.engine.recorder
        for span in (back, *(call.span for call in now.calls)):
            span.events = recorder.events(span.first.event, span.after.event)
            if any(code in (OTHER, STEP_END) for code, _ in span.events):
                self._give_up()  # more streams, or a cache that is emptied
                return
        self._patches.set(torch.nn.Module, "__getstate__", state_as_it_was)
        for reference in dict.fromkeys(call.module for call in now.calls):
            module = reference()
            if module is not None:
                calls = [call for call in now.calls if call.module is reference and call.result]
                self._left.append(
                    _LeftOutOfStep(module, calls, functools.partial(self._answer, back))
                )

    def _answer(self, back: _Span, call: _MadeCall) -> Any:
        """What stands for the result of a call like ``call``; ``None``: it is to be made."""
        if self._depth != 1 or self._in_backward or not self._left:
            return None
        for span in (call.span, *([back] if call.trains else [])):
            if not span.more:
                self._repeated.append(span.entry)
            span.entry[-1] += 1
        self._simulation.engine.assume(
            "of a step's micro-batches of the same shapes the models' calls of the first two were "
            "simulated: the others need the second's memory and time"
        )
        assert call.result is not None
        memory = _RepeatedMemory(self._simulation, back)
        if call.trains:
            self._memories.append(memory)
        return call.result.made(call.span, memory)


@dataclasses.dataclass(frozen=True)
class _RunMark:
    """How many operators, events of memory and nodes of graphs there were."""

    operator: int
    event: int
    node: int

    @classmethod
    def of(cls, simulation: Simulation) -> _RunMark:
        recorder = simulation.engine.recorder
        return cls(recorder.op_count, recorder.event_count, sequence_number())


class _Span:
    """What was between two marks. ``entry`` is its ``RepeatedCall``."""

    def __init__(self, first: _RunMark, after: _RunMark) -> None:
        self.first, self.after = first, after
        self.entry = [first.operator, first.operator, after.operator, 0]
        self.events: list[tuple[int, int]] = []

    @property
    def more(self) -> int:
        """Calls that it stands for."""
        return self.entry[-1]


@dataclasses.dataclass
class _MadeCall:
    """A call of an outermost model."""

    module: weakref.ref[torch.nn.Module]
    form: _Form
    trains: bool
    result: _Result | None
    span: _Span


@dataclasses.dataclass
class _MicroBatch:
    """Calls since the last backward pass, and the pass.

    ``in_use`` are the bytes when it began; ``is_apart``: what the model that trains computes is not
    reached through its results alone. The pass added to gradients of the parameters ``changed``,
    and left versions of all ``gradients``, by ids of parameters (no model is kept alive); it
    ``adds`` where those before it were as the last micro-batch left them. It is the last of so many
    ``alike``.
    """

    calls: list[_MadeCall] = dataclasses.field(default_factory=list)
    in_use: int | None = None
    is_apart: bool = False
    changed: list[weakref.ref[torch.nn.Parameter]] = dataclasses.field(default_factory=list)
    gradients: dict[int, int] = dataclasses.field(default_factory=dict)
    adds: bool = False
    alike: int = 0
    _marks: list[tuple[int, _RunMark]] = dataclasses.field(default_factory=list)
    #: Numbers of the results' nodes that the loss is computed of.
    _reached: set[int] = dataclasses.field(default_factory=set)

    @property
    def trained(self) -> _MadeCall | None:
        """The call of the model that trains, if what it gave is known."""
        return next((call for call in self.calls if call.trains and call.result), None)

    @property
    def back(self) -> _RunMark | None:
        """When gradients came to the model's results that the loss is computed of; ``None``: not
        at one time."""
        marks = [mark for number, mark in self._marks if number in self._reached]
        return marks[-1] if len({mark.operator for mark in marks}) == 1 else None

    def versions(self) -> dict[int, int]:
        """The versions of the gradients that are there of the model that trains."""
        return {
            id(each): version(each.grad) for each in self._parameters() if each.grad is not None
        }

    def note_changed(self, before: Mapping[int, int]) -> None:
        """The pass is over that found gradients of versions ``before``."""
        kept = before.keys() & self.gradients.keys()
        changed = {key for key in kept if before[key] != self.gradients[key]}
        self.changed = [weakref.ref(each) for each in self._parameters() if id(each) in changed]

    def changed_gradients(self) -> list[torch.Tensor | None]:
        """The gradients that the pass added to, as they are now: of parameters that are there."""
        parameters = (reference() for reference in self.changed)
        return [parameter.grad for parameter in parameters if parameter is not None]

    def _parameters(self) -> Iterable[torch.nn.Parameter]:
        module = None if self.trained is None else self.trained.module()
        return () if module is None else module.parameters()

    def begins_like(self, other: _MicroBatch) -> bool:
        if self.in_use is None or other.in_use is None:
            return False
        return abs(self.in_use - other.in_use) <= ALIKE_BYTES

    def is_like(self, other: _MicroBatch) -> bool:
        mine, others = (
            [(call.module(), call.form, call.trains) for call in each.calls]
            for each in (self, other)
        )
        return mine == others

    def watch_gradients(self, nodes: Iterable[Any], now: Callable[[], _RunMark]) -> None:
        """Note when gradients come to what the model gave."""
        marks = self._marks

        def note(number: int, _: Any) -> None:
            marks.append((number, now()))  # a graph must not hold what holds it

        for node in nodes:
            node.register_prehook(functools.partial(note, node_number(node)))

    def forget_graph(self) -> None:
        """Keep nothing of it alive."""
        for call in self.calls:
            if call.result is not None:
                call.result.nodes = frozenset()

    def leads_only_to_results(self, outputs: Any) -> bool:
        """Is what was computed in the model reached through what it gave alone? A loss that it
        keeps as an attribute is not (the balance of experts)."""
        trained = self.trained
        if trained is None or trained.result is None:
            return False
        results, span = trained.result.nodes, trained.span
        for root in outputs:
            nodes = nodes_of(root.grad_fn, results.__contains__)
            self._reached.update(map(node_number, results.intersection(nodes or ())))
            inner = (node for node in nodes or () if node not in results)
            if nodes is None or any(
                span.first.node <= node_number(node) < span.after.node for node in inner
            ):
                return False
        return True


class _Result:
    """What a model's call gave, without the memory of its tensors."""

    def __init__(
        self, simulation: Simulation, outline: Any, tensors: dict[int, Any], nodes: frozenset[Any]
    ) -> None:
        self._simulation = simulation
        self._outline, self._tensors, self.nodes = outline, tensors, nodes

    @classmethod
    def of(cls, found: Any, simulation: Simulation) -> _Result | None:
        """``None``: it is no copy to be made of."""
        tensors: dict[int, Any] = {}
        nodes = set()
        for _, each in walk([found], ""):
            if isinstance(each, torch.nn.Module):
                return None
            if isinstance(each, torch.Tensor):
                on_host = each.device.type == "cpu"
                if (on_host and each.requires_grad) or isinstance(each, torch.nn.Parameter):
                    return None
                number = simulation.allocation_of(each)
                tensors[id(each)] = each if on_host else _Outline(each, number)
                if each.grad_fn is not None:
                    nodes.add(each.grad_fn)
        try:
            outline = copy.deepcopy(found, dict(tensors))
        except Exception:  # of any library's object
            return None
        known = {id(tensor): tensor for tensor in tensors.values()}
        return cls(simulation, outline, known, frozenset(nodes))

    def made(self, span: _Span, memory: _RepeatedMemory) -> Any:
        """The like of it, with new tensors, and memory as in ``span``."""
        known = dict(self._tensors)
        outlines = [outline for outline in known.values() if isinstance(outline, _Outline)]
        learned = [outline for outline in outlines if outline.has_gradient]
        memory.called(span, outlines)
        known |= {
            id(outline): memory.take(outline) for outline in outlines if not outline.has_gradient
        }
        if learned:
            anchor = constructors.zeros((), requires_grad=True)
            results = apply_function(_LearnedResults, anchor, memory, *learned)
            known |= zip(map(id, learned), results, strict=True)
        else:
            memory.let_go()
        return copy.deepcopy(self._outline, known)


class _Outline(TensorOutline):
    def __init__(self, tensor: torch.Tensor, number: int | None) -> None:
        super().__init__(tensor)
        self.has_gradient, self.number = tensor.requires_grad, number


class _RepeatedMemory:
    """What is allocated for a call and its backward pass, up to the pass's end."""

    def __init__(self, simulation: Simulation, back: _Span) -> None:
        self._engine, self._back = simulation.engine, back
        self._held: dict[int, Any] = {}
        self._made: dict[int, torch.Tensor] = {}
        self._rest: list[tuple[int, int]] = []

    def called(self, span: _Span, outlines: list[_Outline]) -> None:
        """Allocate and free as in ``span``; the tensors of ``outlines`` in their places."""
        places = {
            outline.number: functools.partial(self._make, outline)
            for outline in reversed(outlines)
            if outline.number is not None
        }
        self._repeat(span.events, FORWARD, places)

    def _repeat(
        self,
        events: list[tuple[int, int]],
        phase: int,
        places: Mapping[int, Callable[[], None]] = MappingProxyType({}),
    ) -> None:
        engine = self._engine
        recorder = engine.recorder
        name = recorder.string("left_out")
        recorder.op(name, phase, engine.modules.current(phase == BACKWARD))
        engine.memory.repeat(events, self._held, places)

    def _make(self, outline: _Outline) -> None:
        self._made[id(outline)] = outline.made()

    def take(self, outline: _Outline) -> torch.Tensor:
        """The tensor of ``outline``."""
        made = self._made.pop(id(outline), None)
        return outline.made() if made is None else made

    def passed(self) -> None:
        """The backward pass has come here, with gradients that are held up to its end, and in the
        model's up to the first free of what it has not made: the rest comes later."""
        mine = {*self._held, *(number for code, number in self._back.events if code == MALLOC)}
        events = self._back.events
        until = next(
            (
                index
                for index, (code, number) in enumerate(events)
                if code == FREE and number not in mine
            ),
            len(events),
        )
        self._repeat(events[:until], BACKWARD)
        self._rest = events[until:]

    def finish(self) -> None:
        """The backward pass is over."""
        self._repeat(self._rest, BACKWARD)
        self._rest = []
        self.let_go()

    def let_go(self) -> None:
        self._engine.memory.let_go(self._held)


class _LearnedResults(torch.autograd.Function):
    """Gives tensors whose gradients go no further."""

    @staticmethod
    def forward(ctx: Any, _: Any, memory: _RepeatedMemory, *outlines: _Outline) -> Any:
        ctx.set_materialize_grads(False)
        ctx.memory = memory
        return tuple(memory.take(outline) for outline in outlines)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        ctx.memory.passed()
        return (None,) * (2 + len(gradients))


class _LeftOutOfStep(StandInCall):
    """Gives the like of what a call gave that was given the same."""

    def __init__(
        self,
        module: torch.nn.Module,
        calls: list[_MadeCall],
        answer: Callable[[_MadeCall], Any],
    ) -> None:
        self._calls, self._answer = calls, answer
        self._trained = any(parameter.requires_grad for parameter in module.parameters())
        super().__init__(module)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        trains, form = torch.is_grad_enabled() and self._trained, _form((args, kwargs))
        for call in self._calls:
            if (call.form, call.trains) == (form, trains):
                found = self._answer(call)
                if found is not None:
                    return found
        return self.forward(*args, **kwargs)


def _form(given: Any) -> _Form | None:
    """The form of what a call is given; ``None``: there is a gradient, or a model, in it."""
    form: list[tuple[str, Any]] = []
    for path, each in walk(given, ""):
        if isinstance(each, torch.Tensor):
            if each.requires_grad:
                return None
            form.append((path, (tuple(each.shape), each.dtype)))
        elif isinstance(each, torch.nn.Module):
            return None
        elif isinstance(each, bool | str):
            form.append((path, each))
    return tuple(form)


def _has_processes() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()
