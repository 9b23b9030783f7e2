"""Hooks of a training: models, backward passes, optimizers, loss scaling, checkpoints,
programs that it starts."""

from __future__ import annotations

import functools
import gc
import inspect
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import ModuleType
from typing import Any, Final

import torch
from torch.amp import autocast_mode, grad_scaler
from torch.nn.utils import clip_grad
from torch.optim import optimizer as optim

from trainfit.hooks.owners import tensors_of
from trainfit.results.runs.step_cycle import NEVER_STEPS
from trainfit.results.text import dtype_name
from trainfit.simgpu.patching import PatchSet
from trainfit.torch_private.compiled import TRACE_RULES
from trainfit.torch_private.data_loading import TORCHDATA
from trainfit.torch_private.modules import Inside, autocast_is_on, fast_call, scale_of
from trainfit.torch_private.needed import WORKER_LOOP
from trainfit.watch.recorder import phases as ph
from trainfit.watch.recorder.guard import Host, careful, in_phase, in_place_of
from trainfit.watch.recorder.job import script_place
from trainfit.watch.recorder.step_recorder import LIGHT_BACKWARD

_clock = time.perf_counter
_this_thread = threading.get_ident
_is_tracing: Callable[[], bool] = torch.jit.is_tracing  # type: ignore[attr-defined]


def install(host: Host, patches: PatchSet) -> None:
    """Hook from now on, until ``patches`` is restored."""
    patches.hook(torch.nn.Module, "__call__", functools.partial(_module_call, host))
    patches.hook(torch.autograd, "backward", functools.partial(_backward, host))
    patches.hook(torch.autograd, "grad", functools.partial(_grad, host))
    patches.hook(grad_scaler.GradScaler, "scale", functools.partial(_scale, host))
    patches.hook(grad_scaler.GradScaler, "step", functools.partial(_scaled_step, host))
    patches.hook(clip_grad, "clip_grad_norm_", functools.partial(_clip, host))
    patches.hook(autocast_mode.autocast, "__enter__", functools.partial(_autocast, host))
    patches.hook(optim.Optimizer, "__init__", functools.partial(_construct, host))
    patches.hook(subprocess.Popen, "__init__", functools.partial(_program, host))
    patches.hook(BaseProcess, "start", functools.partial(_child, host))
    patches.hook(torch, "set_num_threads", functools.partial(_threads, host))
    patches.hook(gc, "disable", functools.partial(_collector, host, True))
    patches.hook(gc, "enable", functools.partial(_collector, host, False))
    if not gc.isenabled():
        host.learn(collector_off="?")
    _hook_optimizers(host, patches)


def watch_until_a_step(host: Host, patches: PatchSet) -> None:
    """See gradients that are dropped, until an optimizer steps or ``patches`` is restored.

    To be called when all others have hooked ``zero_grad``: what is put back is what was there.
    """
    early = PatchSet()
    for owner in (optim.Optimizer, torch.nn.Module):
        early.hook(owner, "zero_grad", functools.partial(_zero, host, early))
    patches.on_restore(early.restore)


def _module_call(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    inside = Inside()

    # Thousands of modules are called in a step: where PyTorch's own ``__call__`` is the one that
    # is known, what it does is done here, and a call within another costs nothing more.
    def root(module: Any, args: Any, kwargs: Any) -> Any:
        if _is_tracing():
            return original(module, *args, **kwargs)  # its graph has what runs, and nothing more
        entered = count = None
        steps = host.steps
        try:
            if host.live and _this_thread() == steps.thread:
                began = 0.0 if steps.light else _clock()
                entered = steps.enter_root(module, args or tuple(kwargs.values()))
                if not steps.light:
                    if entered is not None:
                        count = host.count_flops(module)
                    if began:
                        steps.cost_s += _clock() - began
        except Exception as error:
            host.failed("forward", error)
        if entered is None:
            return original(module, *args, **kwargs)
        inside.is_on = True
        try:
            result = original(module, *args, **kwargs)
            if count is not None:
                count.add_module(module, args, result)
            return result
        except BaseException as error:
            host.saw(error)
            raise
        finally:
            inside.is_on = False
            try:
                if not steps.light:
                    began = _clock()
                    steps.leave_root(entered)
                    if count is not None:
                        count.remove()
                    steps.cost_s += _clock() - began
            except Exception as error:
                host.failed("forward", error)

    @in_place_of(original)
    def around(self: Any, /, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs) if inside.is_on else root(self, args, kwargs)

    known = fast_call(original, inside, root)
    return around if known is None else in_place_of(original)(known)


def _backward(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    # torch.compile stops before a backward pass, as it does without us.
    @functools.wraps(original)
    def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
        return _in_pass(host, original, tensors, args, kwargs)

    return backward


def _grad(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.autograd.grad``, where a training without an optimizer gets its gradients by it."""
    bind = inspect.signature(original).bind

    @in_place_of(original)
    def grad(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        counts = False
        try:
            if host.live and not host.steps.cycle.has_optimizer:
                given = bind(outputs, *args, **kwargs).arguments
                counts = host.steps.cycle.is_pass(given["inputs"], given.get("create_graph"))
        except Exception as error:
            # A wrong argument is the training's own error, which comes in a moment.
            if not isinstance(error, TypeError):
                host.failed("grad", error)
        if not counts:
            return original(outputs, *args, **kwargs)
        return _in_pass(host, original, outputs, args, kwargs)

    return grad


def _in_pass(
    host: Host,
    original: Callable[..., Any],
    roots: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call what makes gradients, from ``roots``."""
    token = ph.NOT_ENTERED
    steps = host.steps
    try:
        # The first pass tells which thread trains.
        if host.live and (_this_thread() == steps.thread or not steps.trains):
            began = _clock()
            token = steps.enter_backward(roots)
            steps.cost_s += _clock() - began
    except Exception as error:
        host.failed("backward", error)
    try:
        return original(roots, *args, **kwargs)
    except BaseException as error:
        host.saw(error)
        raise
    finally:
        try:
            if token == LIGHT_BACKWARD:
                steps.leave_backward(token)
            elif token != ph.NOT_ENTERED:
                began = _clock()
                steps.leave_backward(token)
                steps.cost_s += _clock() - began
        except Exception as error:
            host.failed("backward", error)


def _hook_optimizers(host: Host, patches: PatchSet) -> None:
    def before(optimizer: Any, *_: Any) -> None:
        steps = host.steps
        try:
            if host.live and (_this_thread() == steps.thread or not steps.trains):
                began = _clock()
                steps.enter_optimizer(optimizer, sys._getframe(1))
                steps.cost_s += _clock() - began
        except Exception as error:
            host.failed("optimizer", error)

    def after(optimizer: Any, *_: Any) -> None:
        try:
            if host.live and _this_thread() == host.steps.thread:
                host.steps.leave_optimizer(optimizer)
        except Exception as error:
            host.failed("optimizer", error)

    patches.see_steps(before, after)


def _construct(host: Host, construct: Callable[..., Any]) -> Callable[..., Any]:
    @in_place_of(construct)
    def __init__(optimizer: Any, *args: Any, **kwargs: Any) -> None:
        with careful(host, "optimizer"):
            host.steps.cycle.made(optimizer)
        construct(optimizer, *args, **kwargs)
        with careful(host, "optimizer"):
            host.steps.cycle.constructed(optimizer)

    return __init__


#: Of the weights, numbers that show whether anything changes them.
_NUMBERS: Final = 256


def _zero(host: Host, early: PatchSet, zero: Callable[..., Any]) -> Callable[..., Any]:
    """Gradients that are dropped, and that no optimizer has used: its ``step`` is never called,
    unless the script changes the weights by itself. After a first step nothing asks any more."""
    before: list[tuple[Any, Any]] = []

    @in_place_of(zero)
    def zero_grad(owner: Any, *args: Any, **kwargs: Any) -> Any:
        cycle = host.steps.cycle
        if cycle.optimizer_steps:
            early.restore()
        elif host.live and cycle.has_optimizer and host.steps.mine:
            with careful(host, "zero_grad"):
                dropped = cycle.zeroed()
                if dropped == 1 and not before:
                    before.extend(_numbers(owner))
                elif dropped == NEVER_STEPS and before:
                    now = (each.detach().reshape(-1)[:_NUMBERS] for each, _ in before)
                    same = all(map(torch.equal, now, (values for _, values in before)))
                    before.clear()
                    if same:
                        host.event("never_steps", text=script_place())
        return zero(owner, *args, **kwargs)

    return zero_grad


def _numbers(owner: Any) -> list[tuple[Any, Any]]:
    """Some weights of an optimizer or a module that have a gradient, and some of their numbers.
    None on a GPU, which would be waited for."""
    is_model = isinstance(owner, torch.nn.Module)
    every = list(owner.parameters()) if is_model else tensors_of(owner)
    trained = [
        parameter
        for parameter in every
        if parameter.grad is not None and parameter.device.type == "cpu"
    ]
    return [
        (parameter, parameter.detach().reshape(-1)[:_NUMBERS].clone()) for parameter in trained[:8]
    ]


#: Programs that are told of: their line is mostly one.
_PROGRAMS: Final = 200


def _program(host: Host, start: Callable[..., Any]) -> Callable[..., Any]:
    """Programs that the script starts, which may need the cores of the training."""
    left = [_PROGRAMS]

    @in_place_of(start)
    def __init__(process: Any, *args: Any, **kwargs: Any) -> None:
        start(process, *args, **kwargs)
        if left[0] and host.live and host.steps.trains:
            with careful(host, "Popen"):
                left[0] -= 1
                if place := script_place():
                    host.event("program", text=place, values={"pid": float(process.pid)})

    return __init__


def _child(host: Host, start: Callable[..., Any]) -> Callable[..., Any]:
    """Processes of :mod:`multiprocessing` that the script starts, and not a DataLoader for it."""
    left = [_PROGRAMS]

    @in_place_of(start)
    def started(process: Any, *args: Any, **kwargs: Any) -> Any:
        of_loader = getattr(getattr(process, "_target", None), "__name__", "") == WORKER_LOOP
        result = start(process, *args, **kwargs)
        if left[0] and host.live and not of_loader:
            with careful(host, "start"):
                left[0] -= 1
                if place := script_place():
                    host.event("child", text=place, values={"pid": float(process.pid)})
        return result

    return started


def _collector(host: Host, off: bool, switch: Callable[[], None]) -> Callable[[], None]:
    """The script switches Python's garbage collector off, or on."""

    @in_place_of(switch)
    def switched() -> None:
        with careful(host, "gc"):
            if host.live:
                host.learn(collector_off=script_place() if off else "")
        switch()

    return switched


def _threads(host: Host, set_number: Callable[..., Any]) -> Callable[..., Any]:
    told: set[str] = set()

    @in_place_of(set_number)
    def set_num_threads(*args: Any, **kwargs: Any) -> Any:
        with careful(host, "set_num_threads"):
            if host.live and len(told) < _PROGRAMS and (place := script_place()) not in told:
                told.add(place)
                host.event("threads", text=place)
        return set_number(*args, **kwargs)

    return set_num_threads


def _scale(host: Host, scale: Callable[..., Any]) -> Callable[..., Any]:
    @in_place_of(scale)
    def noted_scale(scaler: Any, outputs: Any) -> Any:
        with careful(host, "GradScaler.scale"):
            if host.live and host.steps.mine and scaler.is_enabled():
                host.steps.numbers.loss_is_scaled = True
                host.scaled_by(scaler)
        return scale(scaler, outputs)

    return noted_scale


def _scaled_step(host: Host, step: Callable[..., Any]) -> Callable[..., Any]:
    @in_place_of(step)
    def noted_step(scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        before = token = -1
        with careful(host, "GradScaler.step"):
            if host.live and host.steps.mine and scaler.is_enabled():
                before = host.steps.optimizer_steps
                token = host.steps.enter(ph.OPTIMIZER)
                factor = scale_of(scaler)
                if isinstance(factor, torch.Tensor):
                    told, numbers = host.steps.number("scale", factor), host.steps.numbers
                    numbers.scale = numbers.scale if told is None else told
        done = False
        try:
            result = step(scaler, optimizer, *args, **kwargs)
            done = True
        finally:
            with careful(host, "GradScaler.step"):
                host.steps.leave(token)
                if done and before == host.steps.optimizer_steps:
                    host.steps.skip(optimizer)
        return result

    return noted_step


def _clip(host: Host, original: Callable[..., Any]) -> Callable[..., Any]:
    timed = in_phase(host, ph.OPTIMIZER, original)

    @in_place_of(original)
    def clip_grad_norm_(*args: Any, **kwargs: Any) -> Any:
        if host.steps.light:
            return original(*args, **kwargs)
        norm = timed(*args, **kwargs)
        with careful(host, "clip_grad_norm_"):
            # A DTensor's value would take a collective operation.
            if host.live and host.steps.mine and type(norm) is torch.Tensor and norm.numel() == 1:
                told, numbers = host.steps.number("norm", norm), host.steps.numbers
                numbers.norm = numbers.norm if told is None else told
        return norm

    return clip_grad_norm_


def _autocast(host: Host, enter: Callable[..., Any]) -> Callable[..., Any]:
    dtypes: set[torch.dtype] = set()

    @in_place_of(enter)
    def __enter__(self: Any) -> Any:
        if autocast_is_on(self) and self.fast_dtype not in dtypes:
            with careful(host, "autocast"):
                if host.live:
                    dtypes.add(self.fast_dtype)
                    host.learn(autocast=dtype_name(self.fast_dtype))
        return enter(self)

    return __enter__


# ---
# Hooks of what writes checkpoints: PyTorch, safetensors, and the training frameworks.


#: Where the code of hooks stands.
_WITH_HOOKS: Final = ("trainfit.watch.recorder", "trainfit.hooks", "trainfit.torch_private")
#: Modules, and what in them writes a checkpoint.
_SAVERS: Final = (
    ("safetensors.torch", ("save_file", "save_model")),
    ("torch.distributed.checkpoint.state_dict_saver", ("save",)),
    ("accelerate.accelerator", ("Accelerator.save_state", "Accelerator.save_model")),
    ("transformers.trainer", ("Trainer._save_checkpoint", "Trainer.save_model")),
    ("transformers.modeling_utils", ("PreTrainedModel.save_pretrained",)),
    ("lightning.pytorch.trainer.trainer", ("Trainer.save_checkpoint",)),
    ("pytorch_lightning.trainer.trainer", ("Trainer.save_checkpoint",)),
)


def install_saving(
    host: Host, patches: PatchSet, torchdata: Callable[[PatchSet, ModuleType], None]
) -> None:
    """Hook from now on, also modules that are imported later, until ``patches`` is restored;
    ``torchdata`` hooks StatefulDataLoader's module."""
    patches.hook(torch, "save", _checkpoint(host))
    for name, names in _SAVERS:
        patches.when_imported(name, _saving(host, patches, names))

    def seen(module: ModuleType) -> None:
        with careful(host, module.__name__):
            if host.live:
                torchdata(patches, module)

    def traces(module: ModuleType) -> None:
        with careful(host, module.__name__):
            for name in _WITH_HOOKS:
                module.add(name)  # what torch.compile leaves alone

    patches.when_imported(TRACE_RULES, traces)
    patches.when_imported(TORCHDATA, seen)


def _saving(
    host: Host, patches: PatchSet, functions: tuple[str, ...]
) -> Callable[[ModuleType], None]:
    def seen(module: ModuleType) -> None:
        with careful(host, module.__name__):
            if host.live:
                for function in functions:
                    _hook(host, patches, module, function)

    return seen


def _hook(host: Host, patches: PatchSet, owner: Any, name: str) -> None:
    *outer, last = name.split(".")
    for each in outer:
        owner = getattr(owner, each, None)
    function = vars(owner).get(last) if owner is not None else None
    if callable(function):  # another version may not have it
        patches.hook(owner, last, _checkpoint(host))


def _checkpoint(host: Host) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return lambda write: in_phase(host, ph.CHECKPOINT, write, "checkpoint")
