"""State of a running script that interventions see: its models, optimizers, calls and batches."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn.modules import module as nn_module

from trainfit.results.runs.trace import ForwardCalls
from trainfit.simgpu.interventions.operator_watch import OperatorWatch
from trainfit.simgpu.patching import PatchSet
from trainfit.simgpu.recording.module_tracker import has_parameters
from trainfit.simgpu.recording.user_location import user_frame
from trainfit.simgpu.session import Simulation
from trainfit.torch_private.data_loading import LoaderIterator
from trainfit.torch_private.modules import children_of, is_ready


class MadeOptimizer:
    """An optimizer of the script, and the line that made it."""

    def __init__(self, optimizer: torch.optim.Optimizer, place: str | None) -> None:
        self.optimizer = optimizer
        self.place = place

    @property
    def kind(self) -> str:
        return type(self.optimizer).__name__


class Scene:
    """The script as interventions see it.

    Attributes: ``models`` are the outermost modules that own parameters handed to an
    optimizer, largest first; ``optimizers`` those that the script made. Interventions append
    to the lists of callbacks: ``on_parameters(parameters)`` may replace what an optimizer is
    given; ``on_optimizer(optimizer)`` comes when one was made, ``on_model(module)`` before
    the first optimizer of a model is; ``on_call(module)`` before every call of an outermost
    module with parameters and ``after_call(module)`` behind it; ``on_batch(batch)`` may
    replace what a DataLoader gives. ``at_end()`` takes away what an intervention hooked itself.
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
        self.after_call: list[Callable[[torch.nn.Module], None]] = []
        self.on_batch: list[Callable[[Any], Any]] = []
        self.at_end: list[Callable[[], None]] = []
        self._stack: list[torch.nn.Module] = []
        self._handles: list[Any] = []
        self._own = False
        self._calls = self._calls_with_grad = 0

    # -- use -----------------------------------------------------------------------------

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored and :meth:`remove` is called."""
        self.patches = patches
        self._watch_optimizers(patches)
        self._watch_batches(patches)
        self._handles = [
            nn_module.register_module_forward_pre_hook(self._enter),
            nn_module.register_module_forward_hook(self._leave, always_call=True),
        ]

    def remove(self) -> None:
        """Take the hooks away; the patches are their owner's to restore."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        while self.at_end:
            self.at_end.pop()()

    @contextlib.contextmanager
    def own(self) -> Iterator[None]:
        """Optimizers made inside are an intervention's, not the script's."""
        before, self._own = self._own, True
        try:
            yield
        finally:
            self._own = before

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

    def _watch_optimizers(self, patches: PatchSet) -> None:
        construct = torch.optim.Optimizer.__init__
        scene = self

        def __init__(optimizer: Any, params: Any, defaults: dict[str, Any]) -> None:
            if scene._own or isinstance(params, torch.Tensor):
                construct(optimizer, params, defaults)
                return
            place = user_frame()
            given = _groups(params)
            if scene._find_models:
                scene._meet(given)
            for change in scene.on_parameters:
                given = change(given)
            construct(optimizer, given, defaults)
            made = MadeOptimizer(optimizer, place)
            scene.optimizers.append(made)
            for callback in scene.on_optimizer:
                callback(made)

        patches.set(torch.optim.Optimizer, "__init__", __init__)

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

    def _leave(self, module: torch.nn.Module, _: Any, __: Any) -> None:
        if self._stack:
            self._stack.pop()
            if not self._stack and has_parameters(module):
                for callback in self.after_call:
                    callback(module)


def _groups(params: Any) -> list[Any]:
    """What an optimizer is given, with iterators read out: they can be read only once."""
    return [
        {**each, "params": list(each["params"])}
        if isinstance(each, dict) and not isinstance(each.get("params"), torch.Tensor | None)
        else each
        for each in params
    ]


def parameters_in(given: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors in an optimizer's argument: plain, named, or in groups."""
    found: list[torch.Tensor] = []
    for each in given:
        if isinstance(each, dict):
            inner = each.get("params", ())
            found += parameters_in([inner] if isinstance(inner, torch.Tensor) else inner)
        elif isinstance(each, tuple):
            found += parameters_in(each[1:])
        elif isinstance(each, torch.Tensor):
            found.append(each)
    return found


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
        (sum(p.numel() for p in module.parameters()), module)
        for module in modules
        if id(module) not in inner and any(id(p) in wanted for p in module.parameters())
    ]
    outer.sort(key=lambda pair: (-pair[0], type(pair[1]).__name__))
    return [module for _, module in outer]
