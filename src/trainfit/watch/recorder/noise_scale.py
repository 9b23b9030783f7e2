"""The gradient noise scale of a watched run: finds what :class:`NoiseScale` needs to be told."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from trainfit.batch.noise_scale import NoiseScale
from trainfit.scripts.samples.batch_sizes import samples_in
from trainfit.simgpu.patching import LocalHook
from trainfit.torch_private.modules import forward_hooks_of, is_compiled


class WatchedNoiseScale:
    """Measures the largest model that a step calls to train, from the second step on.

    In the first step it is not known which model that is; and hooks of optimizers cannot be added
    at its end, which is within such hooks. Without accumulation on one device, single samples of
    some modules are measured: a recorder cannot repeat a script's forward pass. ``every`` as of
    :class:`NoiseScale`.
    """

    def __init__(self, every: int | None = None) -> None:
        #: The GradScaler, once the script has used one.
        self.scaler: Any = None
        self._why_not = "no training step was seen"
        self._every = every
        self._largest: weakref.ref[torch.nn.Module] | None = None
        self._noise: NoiseScale | None = None
        self._handle: Any = None

    def root_called(self, module: torch.nn.Module, step: int) -> None:
        """A module is called to train, larger than those before it in this step."""
        if self._handle is not None:
            return
        if step == 0:
            self._largest = weakref.ref(module)
            self._why_not = "the run ended after its first step"
        elif self._largest is not None and self._largest() is module:
            hook = LocalHook(self._called)
            self._handle = module.register_forward_pre_hook(hook, with_kwargs=True)

    def _called(
        self, module: torch.nn.Module, args: tuple[Any, ...], options: dict[str, Any]
    ) -> None:
        """Count the samples of the micro-batch, before each call of the model."""
        if not (torch.is_grad_enabled() and module.training):
            return
        try:
            given = args[0] if args else next(iter(options.values()), None)
            self._count(module, samples_in(given))
        except Exception as error:  # never into the training
            self._why_not = f"{type(error).__name__}: {error}"

    def _count(self, module: torch.nn.Module, samples: int | None) -> None:
        if not samples:
            self._why_not = "the samples of a batch are not known: the model is given no tensor"
            return
        if self._noise is None:
            self._noise = NoiseScale(
                module, samples, every=self._every, per_example=not is_compiled(module)
            )
        self._noise.scaler = self.scaler
        self._noise.samples(samples)

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """The model has no hook of ours meanwhile: a file that it is written to has none."""
        model = None if self._largest is None else self._largest()
        taken: list[tuple[dict[int, Any], dict[int, Any]]] = []
        for module in () if model is None or self._handle is None else model.modules():
            hooks = forward_hooks_of(module)
            ours = {n for each in hooks for n, hook in each.items() if type(hook) is LocalHook}
            for forward_hook in hooks if ours else ():
                taken.append((forward_hook, {**forward_hook}))
                for number in ours:
                    forward_hook.pop(number, None)
        try:
            yield
        finally:
            for hooks_now, before in taken:
                added = {n: hook for n, hook in hooks_now.items() if n not in before}
                hooks_now.clear()
                hooks_now.update(before | added)  # in their order

    def close(self) -> None:
        """Remove the hooks."""
        if self._handle is not None:
            self._handle.remove()
        if self._noise is not None:
            self._noise.close()

    def save(self, path: Path) -> str:
        """Write what was measured; returns why there is nothing to write ("": it is written).

        Raises ``OSError``.
        """
        if self._noise is None:
            return self._why_not
        self._noise.save(path)
        return ""
