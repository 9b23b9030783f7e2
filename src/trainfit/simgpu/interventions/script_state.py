"""What interventions see of a running script, its state and its operators, and their base class."""

from __future__ import annotations

import contextlib
import functools
import gc
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any, ClassVar, Final

import torch
from torch.nn.parameter import is_lazy

from trainfit.results.runs.trace import Applicability, Compute, ForwardCalls
from trainfit.simgpu.device.ownership import has_parameters
from trainfit.simgpu.device.recorder import SETUP
from trainfit.simgpu.device.settling import steady_step
from trainfit.simgpu.device.user_location import user_frame
from trainfit.simgpu.device.values import tensors_in
from trainfit.simgpu.operators.flops import flops_of
from trainfit.simgpu.operators.kernel_rules import kind_of_work, least_moved_bytes, makes_kernel
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.session import Simulation
from trainfit.torch_private.data_loading import LoaderIterator
from trainfit.torch_private.modules import APPLY, children_of, is_ready

# ---
# Watches the operators of a simulated run from outside the engine: their work, their operands.


#: Called after an operator with it, its arguments and its result.
Listener = Callable[[Any, tuple[Any, ...], Any], None]


class OperatorWatch:
    """Counts the work of each optimizer step; tells listeners of every operator.

    FLOPs are by :mod:`trainfit.simgpu.operators.flops`; traffic is every tensor that an operator
    reads or writes, once; views count nothing. What no GPU can do without is by
    :mod:`trainfit.simgpu.operators.kernel_rules`.
    """

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._listeners: list[Listener] = []
        self._work: Counter[str] = Counter()
        self._setup: Counter[str] = Counter()
        self._steps: list[Counter[str]] = []
        self._operators = 0
        self._moving = 0
        self._l2_bytes = simulation.gpu.l2_bytes

    def listen(self, listener: Listener) -> None:
        """Call ``listener`` after every operator from now on."""
        self._listeners.append(listener)

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""
        engine = self._simulation.engine
        run, info_of = engine.run, engine.info
        listeners, attempt = self._listeners, engine.accounting.attempt

        def watched(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = run(func, args, kwargs)
            info = info_of(func)
            if not info.composite:  # its parts come by themselves
                if not info.view and not self._moving:
                    attempt(func, self._count, func, args, kwargs, result)
                for listener in listeners:
                    attempt(func, listener, func, args, result)
            return result

        apply = APPLY.now

        def _apply(module: Any, *args: Any, **kwargs: Any) -> Any:
            self._moving += 1
            try:
                return apply(module, *args, **kwargs)
            finally:
                self._moving -= 1

        patches.set(engine, "run", watched)
        patches.set(*APPLY, _apply)
        self._simulation.on_step(self._step_end)

    def steady_step(self) -> Compute | None:
        """The work of the typical step (:mod:`trainfit.simgpu.device.settling`); ``None``
        before the first.

        Where the first is the only one, it comes without the model's set-up and moves.
        """
        if not self._steps:
            return None
        totals = [sum(step.values()) for step in self._steps]
        work = self._steps[steady_step([step["operators"] for step in self._steps], totals)]
        flops = {name: n for name, n in work.items() if "/" in name}
        return Compute(
            flops=sum(flops.values()),
            traffic_bytes=work["traffic"],
            operators=work["operators"],
            flops_of=flops,
            kernels=work["kernels"],
            moved_bytes=work["moved"],
            compiled=self._simulation.is_eager,
        )

    def _step_end(self, steps: int) -> None:
        if not self._simulation.engine.forward_seen:  # nothing tells set-up from a step
            self._work += self._setup
        self._setup.clear()
        operators = self._simulation.engine.recorder.op_count
        self._work["operators"] = operators - self._operators
        self._steps.append(self._work)
        self._work, self._operators = Counter(), operators

    def _count(self, func: Any, args: Any, kwargs: Any, result: Any) -> None:
        work = self._setup if self._simulation.engine.phase() == SETUP else self._work
        operands = tensors_in((args, result))
        traffic = sum(tensor._spec.nbytes for tensor in operands)
        work["traffic"] += traffic
        work["kernels"] += traffic > 0 and makes_kernel(func)
        flops = flops_of(func, args, kwargs, result)
        if flops:
            work[kind_of_work(func, operands[0]._spec.dtype)] += flops
        work["moved"] += least_moved_bytes(func, args, result, self._l2_bytes)


#: Where Transformers' ``Trainer`` is.
_TRAINER: Final = "transformers.trainer"


class MadeOptimizer:
    """An optimizer of the script, the line that made it, and Transformers' ``Trainer`` that chose
    it by its arguments (``None``: the script did, also where it gives it to a trainer)."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, place: str | None, trainer: Any = None
    ) -> None:
        self.optimizer = optimizer
        self.place = place
        self.trainer = trainer

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__

    def replaces(self, other: MadeOptimizer) -> bool:
        """Did the same line make both, over the same parameters? The earlier one is let go then,
        as the script does."""
        if self.place is None or self.place != other.place or self.kind != other.kind:
            return False
        mine, its = (
            [id(tensor) for group in each.optimizer.param_groups for tensor in group["params"]]
            for each in (self, other)
        )
        return mine == its


class Scene:
    """The script as interventions see it.

    Attributes: ``models`` are the outermost modules that own parameters handed to an
    optimizer, largest first; ``optimizers`` those that the script made. Interventions append
    to the lists of callbacks: ``on_parameters(parameters)`` may replace what an optimizer is
    given; ``on_optimizer(optimizer)`` comes when one was made, ``on_model(module)`` before
    the first optimizer of a model is; ``on_call(module)`` before every call of an outermost
    module with parameters and ``after_call(module, output)`` behind it; ``on_batch(batch)`` may
    replace what a DataLoader gives.
    What an intervention hooks itself ends with ``patches``.
    """

    def __init__(
        self, simulation: Simulation, operators: OperatorWatch, *, find_models: bool
    ) -> None:
        self.simulation = simulation
        self._find_models = find_models
        self.operators = operators
        self.models: list[torch.nn.Module] = []
        self.optimizers: list[MadeOptimizer] = []
        self.on_parameters: list[Callable[[list[Any]], list[Any]]] = []
        self.on_optimizer: list[Callable[[MadeOptimizer], None]] = []
        self.on_model: list[Callable[[torch.nn.Module], None]] = []
        self.on_call: list[Callable[[torch.nn.Module], None]] = []
        self.after_call: list[Callable[[torch.nn.Module, Any], None]] = []
        self.on_batch: list[Callable[[Any], Any]] = []
        self._stack: list[torch.nn.Module] = []
        self._own = False
        self._trainer: Any = None
        self._calls = self._calls_with_grad = 0

    # -- use -----------------------------------------------------------------------------

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""
        self.patches = patches
        self._watch_optimizers(patches)
        self._watch_batches(patches)
        patches.see_calls(self._enter, self._leave)

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Optimizers made inside are an intervention's, not the script's."""
        cycle, before = self.simulation.cycle, self._own
        self._own = cycle.makes_others = True
        try:
            yield
        finally:
            self._own = cycle.makes_others = before

    def forward_calls(self) -> ForwardCalls:
        return ForwardCalls(self._calls, self._calls_with_grad)

    # -- modules -------------------------------------------------------------------------

    def path_of(self, module: torch.nn.Module) -> str | None:
        """``"0:encoder.layers.1"``: the model's place in ``models`` and the path in it."""
        for index, model in enumerate(self.models):
            for path, each in model.named_modules():
                if each is module:
                    return f"{index}:{path}"
        return None

    def modules_at(self, paths: Iterable[str]) -> list[torch.nn.Module]:
        """The modules that :meth:`path_of` named, as far as they are in this run."""
        known = {
            f"{index}:{path}": module
            for index, model in enumerate(self.models)
            for path, module in model.named_modules()
        }
        return [known[path] for path in paths if path in known]

    def is_inside(self, kind: type[torch.nn.Module]) -> bool:
        """Does a module of this kind compute now?"""
        return any(isinstance(module, kind) for module in self._stack)

    # -- watching ------------------------------------------------------------------------

    def watch_trainers(self, look: Callable[[Any, Any, Any], Any]) -> None:
        """Call ``look(trainer, model, args)`` before each Transformers' ``Trainer`` with a model is
        made, also TRL's; it is made with the model that is returned."""

        def seen(module: ModuleType) -> None:
            self.patches.hook(module.Trainer, "__init__", functools.partial(_looked_at, look))

        self.patches.when_imported(_TRAINER, seen)

    def _choosing(self, create: Callable[..., Any]) -> Callable[..., Any]:
        """A trainer's own choice of an optimizer: a subclass's is the script's."""

        @functools.wraps(create)
        def create_optimizer(trainer: Any, *args: Any, **named: Any) -> Any:
            self._trainer = trainer
            try:
                return create(trainer, *args, **named)
            finally:
                self._trainer = None

        return create_optimizer

    def _watch_optimizers(self, patches: PatchSet) -> None:
        construct = torch.optim.Optimizer.__init__
        scene = self

        def __init__(optimizer: Any, params: Any, defaults: dict[str, Any]) -> None:
            if scene._own or isinstance(params, torch.Tensor) or not isinstance(params, Iterable):
                construct(optimizer, params, defaults)
                return
            place = user_frame()
            given = _groups(params)
            if scene._find_models:
                scene._meet(given)
            for change in scene.on_parameters:
                given = change(given)
            construct(optimizer, given, defaults)
            made = MadeOptimizer(optimizer, place, scene._trainer)
            scene.optimizers[:] = [
                made_optimizer
                for made_optimizer in scene.optimizers
                if not made.replaces(made_optimizer)
            ]
            scene.optimizers.append(made)
            for callback in scene.on_optimizer:
                callback(made)

        patches.set(torch.optim.Optimizer, "__init__", __init__)

        def seen(module: ModuleType) -> None:
            if hasattr(module.Trainer, "create_optimizer"):
                patches.hook(module.Trainer, "create_optimizer", scene._choosing)

        patches.when_imported(_TRAINER, seen)

    def _watch_batches(self, patches: PatchSet) -> None:
        iterator = LoaderIterator
        advance = iterator.__next__
        scene = self

        def __next__(batches: Any) -> Any:
            batch = advance(batches)
            for change in scene.on_batch:
                batch = change(batch)
            return batch

        patches.set(iterator, "__next__", __next__)

    def _meet(self, given: list[Any]) -> None:
        """Find the models that an optimizer's parameters belong to."""
        known = {id(model) for model in self.models}
        for model in models_of(parameters_in(given)):
            if id(model) not in known:
                self.models.append(model)
                for callback in self.on_model:
                    callback(model)

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        self._stack.append(module)
        if len(self._stack) == 1 and has_parameters(module):
            self._calls += 1
            self._calls_with_grad += torch.is_grad_enabled()
            for callback in self.on_call:
                callback(module)

    def _leave(self, module: torch.nn.Module, _: Any, output: Any) -> None:
        if self._stack:
            self._stack.pop()
            if not self._stack and has_parameters(module):
                for callback in self.after_call:
                    callback(module, output)


def _looked_at(
    look: Callable[[Any, Any, Any], Any], construct: Callable[..., None]
) -> Callable[..., None]:
    @functools.wraps(construct)
    def __init__(
        trainer: Any, model: Any = None, args: Any = None, *more: Any, **named: Any
    ) -> None:
        if model is not None and hasattr(model, "named_parameters"):
            model = look(trainer, model, args)
        construct(trainer, model, args, *more, **named)

    return __init__


def on_configurations(scene: Scene, trainers: Iterable[str], look: Callable[[Any], None]) -> None:
    """Call ``look`` with each configuration of TRL's (``trainers``: the first words of their
    classes, SFT) that has its values, before others are derived from them: of a class that the
    script makes of TRL's as well."""

    def looked_at(complete: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(complete)
        def __post_init__(config: Any) -> None:
            look(config)
            complete(config)

        return __post_init__

    def seen(trainer: str, module: ModuleType) -> None:
        scene.patches.hook(getattr(module, f"{trainer}Config"), "__post_init__", looked_at)

    for trainer in trainers:
        name = f"trl.trainer.{trainer.lower()}_config"
        scene.patches.when_imported(name, functools.partial(seen, trainer))


def _groups(params: Any) -> list[Any]:
    """What an optimizer is given, with iterators read out: they can be read only once."""
    return [
        {**parameter, "params": list(parameter["params"])}
        if isinstance(parameter, dict)
        and not isinstance(parameter.get("params"), torch.Tensor | None)
        else parameter
        for parameter in params
    ]


def parameters_in(given: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in an optimizer's argument: plain, named, or in groups."""
    tensors: list[torch.Tensor] = []
    for each in given:
        if isinstance(each, dict):
            inner = each.get("params", ())
            tensors += parameters_in([inner] if isinstance(inner, torch.Tensor) else inner)
        elif isinstance(each, tuple):
            tensors += parameters_in(each[1:])
        elif isinstance(each, torch.Tensor):
            tensors.append(each)
    return tensors


def models_of(parameters: Iterable[torch.Tensor]) -> list[torch.nn.Module]:
    """The outermost modules that own one of ``parameters``, largest first.

    Optimizers get parameters, not models; so all living modules are looked through.
    """
    wanted = {id(parameter) for parameter in parameters}
    modules = [
        each
        for each in gc.get_objects()
        if issubclass(type(each), torch.nn.Module) and is_ready(each)
    ]
    inner = {id(child) for module in modules for child in children_of(module).values()}
    outer = [
        (sum(p.numel() for p in module.parameters() if not is_lazy(p)), module)
        for module in modules
        if id(module) not in inner and any(id(p) in wanted for p in module.parameters())
    ]
    outer.sort(key=lambda pair: (-pair[0], type(pair[1]).__name__))
    return [module for _, module in outer]


# ---
# Base class of interventions: one change of a running script, made from outside.


class Intervention:
    """One change; subclasses say how it is found and how it is made.

    A survey calls :meth:`watch` before the script runs and :meth:`finding` at its end; it
    changes nothing. A trial calls :meth:`apply` before the script runs, with the survey's
    ``targets``. ``changed`` counts what was changed: 0 at the end means that nothing was.
    """

    name: ClassVar[str]

    def __init__(self, targets: tuple[str, ...] = ()) -> None:
        self.targets = targets
        self.changed = 0

    def watch(self, scene: Scene) -> None:
        """Note from now on what this would change."""
        self.scene = scene

    def finding(self) -> Applicability:
        """Does it apply to what was seen?"""
        raise NotImplementedError

    def apply(self, scene: Scene) -> None:
        """Change the script from now on."""
        raise NotImplementedError

    def no(self, reason: str) -> Applicability:
        """It does not apply."""
        return Applicability(self.name, False, reason)


def places(lines: dict[str, None]) -> tuple[str, ...]:
    """Lines in the order they were met, each once."""
    return tuple(lines)
