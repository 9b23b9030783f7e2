"""Which ranks work on the same samples: those of tensor parallelism and of context parallelism."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final

from torch import distributed
from torch.distributed import device_mesh

from trainfit.simgpu.communication.collectives import Communication
from trainfit.simgpu.patching import PatchSet

#: Where modules are spread over ranks, and where samples are.
_PARALLEL: Final = "torch.distributed.tensor.parallel"
_CONTEXT: Final = "torch.distributed.tensor.experimental"
#: Where Transformers spreads a model by its ``tp_plan``: of 5.23, and of 4.50 and later.
_BY_PLAN: Final = {
    "transformers.distributed.tensor_parallel": "apply_tensor_parallelism",
    "transformers.integrations.tensor_parallel": "distribute_model",
}


def install(patches: PatchSet) -> None:
    """Count them while a script makes them."""
    patches.when_imported(_PARALLEL, functools.partial(_of_modules, patches))
    patches.when_imported(_CONTEXT, functools.partial(_of_samples, patches))
    for module, name in _BY_PLAN.items():
        patches.when_imported(module, functools.partial(_of_plan, patches, name))


def samples_shared(meshes: list[frozenset[int]]) -> int:
    """How many ranks have the samples of one that is in all of ``meshes``, each of which has the
    same samples: those of 2 and of 4 that cross in one rank are 8, one within another is none more.
    """
    found: list[frozenset[int]] = []
    for mesh in sorted(meshes, key=len, reverse=True):
        if all(len(mesh & other) < 2 for other in found):
            found.append(mesh)
    product = 1
    for mesh in found:
        product *= len(mesh)
    return product


def _of_modules(patches: PatchSet, module: Any) -> None:
    """Each rank that a module is spread over gets the same samples."""

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def parallelize_module(
            module: Any, device_mesh: Any = None, parallelize_plan: Any = None, **more: Any
        ) -> Any:
            result = original(module, device_mesh, parallelize_plan, **more)
            if is_of_torch(parallelize_plan):
                _share(device_mesh)
            return result

        return parallelize_module

    def is_of_torch(plan: Any) -> bool:
        # A style of a library's own may as well spread experts over ranks of other samples.
        base = module.ParallelStyle
        styles = plan.values() if isinstance(plan, dict) else (plan,)
        return any(
            kind is not base and kind.__module__.startswith("torch.distributed.tensor.")
            for style in styles
            if isinstance(style, base)
            for kind in type(style).__mro__
        )

    patches.hook(module, "parallelize_module", hook)


def _of_plan(patches: PatchSet, name: str, module: Any) -> None:
    if not callable(vars(module).get(name)):
        return

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def spread(*args: Any, **more: Any) -> Any:
            given = (*args, *more.values())
            mesh = next((each for each in given if isinstance(each, device_mesh.DeviceMesh)), None)
            if mesh is not None:
                _share(mesh)
            return original(*args, **more)

        return spread

    patches.hook(module, name, hook)


def _of_samples(patches: PatchSet, module: Any) -> None:
    """Each rank has a part of the same sequences."""
    if not hasattr(module, "context_parallel"):  # PyTorch 2.4 has none
        return

    def hook(original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def context_parallel(mesh: Any, *args: Any, **more: Any) -> Any:
            _share(mesh)
            return original(mesh, *args, **more)

        return context_parallel

    patches.hook(module, "context_parallel", hook)


def _share(mesh: Any) -> None:
    communication = Communication.current
    if communication is None:
        return
    if mesh is None:
        ranks = frozenset(range(distributed.get_world_size()))
    else:
        ranks = frozenset(mesh.mesh.flatten().tolist())
    if ranks not in communication.sharers:
        communication.sharers.append(ranks)
        communication.sharing = samples_shared(communication.sharers)
