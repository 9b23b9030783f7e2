"""Launches of Triton kernels (``@triton.jit``), and the arguments that they read and write."""

from __future__ import annotations

import ast
import builtins
import dataclasses
import functools
import importlib
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, Final

import torch

from trainfit.findings.source_code import function_syntax, names_in
from trainfit.results.gpus import Kernel
from trainfit.simgpu import constructors
from trainfit.simgpu.device.engine import Engine
from trainfit.simgpu.device.recorder import BACKWARD
from trainfit.simgpu.device.tensor import CUDA, DeviceTensor, SimulatedTensor, plain
from trainfit.simgpu.operators.kernel_rules import dtype_of, stored_bytes
from trainfit.simgpu.operators.launch_log import KernelLog
from trainfit.simgpu.patching import PatchSet

# ---
# The arguments that a Triton kernel reads and writes, by its Python source.


_READS: Final = ("load", "load_tensor_descriptor", "gather", "descriptor_load")
#: Modules whose functions keep to what they are given.
_LANGUAGE: Final = ("tl", "triton", "language", "libdevice", "math", "tle", "gl")
_WRITES: Final = ("store", "store_tensor_descriptor", "scatter", "descriptor_store")


@dataclasses.dataclass(frozen=True)
class Access:
    """Names of the parameters that a kernel reads from and writes to; ``products``: does it
    compute matmuls (``tl.dot``), whose FLOPs its arguments do not tell?"""

    reads: frozenset[str]
    writes: frozenset[str]
    products: bool = False


def access_of(function: Callable[..., Any]) -> Access | None:
    """The access of a kernel's Python function to its pointers; ``None`` where its source is not to
    be had.

    A pointer that is handed to another function counts as read and written.
    """
    code = getattr(inspect.unwrap(function), "__code__", None)
    tree = None if code is None else function_syntax(code)
    return _Reader(tree).access() if isinstance(tree, ast.FunctionDef) else None


class _Reader:
    """Follows a kernel's parameters through its assignments to loads and stores."""

    def __init__(self, function: ast.FunctionDef) -> None:
        self._function = function
        every = function.args
        names = [each.arg for each in (*every.posonlyargs, *every.args, *every.kwonlyargs)]
        #: For each name the parameters that it points to.
        self._points: dict[str, frozenset[str]] = {name: frozenset((name,)) for name in names}
        self._reads: set[str] = set()
        self._writes: set[str] = set()

    def access(self) -> Access:
        while self._assign():
            pass
        calls = [node for node in ast.walk(self._function) if isinstance(node, ast.Call)]
        for call in calls:
            self._call(call)
        products = any(_name(call).startswith("dot") for call in calls)
        return Access(frozenset(self._reads), frozenset(self._writes), products)

    def _assign(self) -> bool:
        """One pass over all assignments; was there anything new?"""
        changed = False
        for node in ast.walk(self._function):
            if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign, ast.NamedExpr)):
                if node.value is None:
                    continue
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                for name in (name for target in targets for name in names_in(target)):
                    known = self._points.get(name, frozenset())
                    points = known | self._pointed(node.value)
                    changed = changed or points != known
                    self._points[name] = points
        return changed

    def _pointed(self, node: ast.AST) -> frozenset[str]:
        """The parameters that an expression points to: what was loaded points nowhere."""
        if isinstance(node, ast.Name):
            return self._points.get(node.id, frozenset())
        if isinstance(node, ast.Call) and _name(node) in _READS:
            return frozenset()
        parts: Iterator[ast.AST] = ast.iter_child_nodes(node)
        return frozenset().union(*map(self._pointed, parts))

    def _call(self, call: ast.Call) -> None:
        name = _name(call)
        where = self._where(call)
        if name in _READS:
            self._reads |= where
        elif name in _WRITES:
            self._writes |= where
        elif name.startswith("atomic_"):
            self._reads |= where
            self._writes |= where
        elif self._is_foreign(call):
            handed = self._pointed(ast.Tuple(elts=_arguments(call)))
            self._reads |= handed
            self._writes |= handed

    def _is_foreign(self, call: ast.Call) -> bool:
        """Is another kernel's function called, not one of Triton's or Python's?"""
        root: ast.expr = call.func
        if isinstance(root, ast.Name):
            return not hasattr(builtins, root.id)
        while isinstance(root, ast.Attribute):
            root = root.value
        return (
            isinstance(root, ast.Name) and root.id not in self._points and root.id not in _LANGUAGE
        )

    def _where(self, call: ast.Call) -> frozenset[str]:
        """What a load or store is of: the first argument, or the descriptor whose method it is."""
        if isinstance(call.func, ast.Attribute):
            own = self._pointed(call.func.value)
            if own:
                return own
        named = [keyword.value for keyword in call.keywords if keyword.arg == "pointer"]
        first = [*call.args[:1], *named][:1]
        return self._pointed(first[0]) if first else frozenset()


def _name(call: ast.Call) -> str:
    """The name of the function that is called, without its module."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def _arguments(call: ast.Call) -> list[ast.expr]:
    return [*call.args, *(keyword.value for keyword in call.keywords)]


#: Kernels that are named in the note.
_NAMED: Final = 6
#: What the autotuner clears between two measurements (triton.testing.do_bench), in bytes.
_CACHE_BYTES: Final = 256 << 20
#: Bits of the memory bus of no GPU in particular: with the clock it gives the bandwidth.
_BUS_BITS: Final = 256


class TritonKernels:
    """Takes Triton's launches and its driver's answers over while a simulation runs."""

    def __init__(self, engine: Engine, kernels: KernelLog) -> None:
        self._engine, self._kernels = engine, kernels
        #: Launches in each step by the kernel's name, and kernels that compute matmuls.
        self._launches: dict[str, Counter[int]] = {}
        self._products: set[str] = set()

    def install(self, patches: PatchSet) -> None:
        """Patch Triton when it is imported, if it ever is."""
        patches.when_imported("triton", functools.partial(self._patch, patches))

    def _patch(self, patches: PatchSet, triton: ModuleType) -> None:
        jit: Any = importlib.import_module("triton.runtime.jit")
        testing: Any = importlib.import_module("triton.testing")
        driver = triton.runtime.driver
        launch = self._launch

        def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
            return launch(kernel, args, kwargs, None if warmup else grid)

        patches.set(jit.JITFunction, "run", run)
        target = importlib.import_module("triton.backends.compiler").GPUTarget
        name = "_active" if "_active" in vars(driver) else "active"
        patches.set(driver, name, _Driver(self._engine, target))
        for measure in ("do_bench", "do_bench_cudagraph"):
            patches.set(testing, measure, _measure)

    # -- launches --------------------------------------------------------------------------

    def _launch(self, kernel: Any, args: Any, kwargs: dict[str, Any], grid: Any) -> Any:
        """One launch; none where ``grid`` is ``None``. Returns what stands for its binary."""
        for hook in getattr(kernel, "pre_run_hooks", ()):
            hook(*args, **kwargs)
        names = _signature(kernel.fn)
        given = {name: value for name, value in kwargs.items() if name in names.parameters}
        bound = names.bind(*args, **given)
        bound.apply_defaults()
        if callable(grid):
            grid = grid(bound.arguments)
        if grid is not None and all(int(each) > 0 for each in grid):
            self._record(kernel, bound.arguments)
        return _Compiled(kernel, kwargs)

    def _record(self, kernel: Any, arguments: Mapping[str, Any]) -> None:
        tensors = {name: list(_tensors(value)) for name, value in arguments.items()}
        _check_devices(tensors)
        simulated = {
            name: [each for each in tensor if type(each) is SimulatedTensor]
            for name, tensor in tensors.items()
        }
        if not any(simulated.values()):
            return  # shapes are inferred with meta tensors
        access = _access(kernel.fn)
        entered = self._engine.enter()
        try:
            self._write(kernel.fn.__name__, simulated, access)
        finally:
            if entered:
                self._engine.leave()

    def _write(
        self, name: str, tensors: Mapping[str, Sequence[SimulatedTensor]], access: Access | None
    ) -> None:
        engine = self._engine
        phase = engine.phase()
        string = engine.recorder.string(f"triton.{name}")
        engine.recorder.op(string, phase, engine.modules.current(phase == BACKWARD))
        every = [tensor for found in tensors.values() for tensor in found]
        touched = reads = every
        writes: list[SimulatedTensor] = []
        if access is not None and access.reads | access.writes:
            reads = [each for name in access.reads for each in tensors.get(name, ())]
            touched = writes = [each for name in access.writes for each in tensors.get(name, ())]
        for each in touched:
            engine.values.forget(each._life)
        largest = max(every, key=lambda each: each._spec.nbytes)
        products = access is not None and access.products
        kind = "unknown" if products else "pointwise"
        self._kernels.kernel(Kernel(kind, dtype_of(largest), 0, _bytes(reads), _bytes(writes)))
        self._launches.setdefault(name, Counter())[engine.recorder.step] += 1
        if products:
            self._products.add(name)

    def assumption(self) -> str | None:
        """What the result has to state of all launches together."""
        if not self._launches:
            return None
        most = {name: max(steps.values()) for name, steps in self._launches.items()}
        ordered = sorted(most, key=lambda name: -most[name])
        named = [f"{name} ({most[name]}× a step)" for name in ordered[:_NAMED]]
        rest = [f"{len(ordered) - _NAMED} more"] if len(ordered) > _NAMED else []
        if len(ordered) == 1:
            text = "1 Triton kernel was costed by the bytes of its arguments, and what it writes is"
        else:
            text = (
                f"{len(ordered)} Triton kernels were costed by the bytes of their arguments, and "
                "what they write is"
            )
        text += f" unknown: {', '.join(named + rest)}"
        if self._products:
            text += (
                f"; the FLOPs of {', '.join(sorted(self._products)[:_NAMED])} are unknown: "
                "with them a step is longer"
            )
        return text


@functools.cache
def _signature(function: Any) -> inspect.Signature:
    return inspect.signature(function)


@functools.cache
def _access(function: Any) -> Access | None:
    return access_of(function)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in an argument: a tensor, several, or a descriptor or wrapper of one."""
    if isinstance(value, DeviceTensor):
        yield plain(value)
    elif isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from _tensors(each)
    elif isinstance(base := getattr(value, "base", None), torch.Tensor):
        yield from _tensors(base)


def _check_devices(tensors: Mapping[str, Sequence[torch.Tensor]]) -> None:
    for place, tensor in enumerate(tensors.values()):
        if any(each.device.type == "cpu" for each in tensor):
            raise ValueError(
                f"Pointer argument (at {place}) cannot be accessed from Triton (cpu tensor?)"
            )


def _bytes(tensors: Sequence[SimulatedTensor]) -> int:
    return sum(
        stored_bytes(each._spec) for each in {id(tensor): tensor for tensor in tensors}.values()
    )


class _Compiled:
    """Stands for a ``CompiledKernel``, which launches with another grid and tells its resources:
    as of a kernel that no resource bounds."""

    def __init__(self, kernel: Any, options: Mapping[str, Any]) -> None:
        self._kernel, self._options = kernel, dict(options)
        self.name = kernel.fn.__name__
        self.n_regs, self.n_spills, self.n_max_threads = 32, 0, 1024
        self.asm: dict[str, str] = {}
        self.metadata = SimpleNamespace(
            shared=0, name=self.name, num_warps=options.get("num_warps", 4), num_ctas=1
        )

    def _init_handles(self) -> None:
        return None

    def __getitem__(self, grid: Any) -> Any:
        def launch(*args: Any, **_: Any) -> None:
            # A binary takes the arguments that are no constants, or all of them.
            self._kernel.run(*args, grid=grid, warmup=False, **self._options)

        return launch


# -- the driver ------------------------------------------------------------------------------------


def _measure(fn: Any, *_: Any, quantiles: Any = None, **__: Any) -> Any:
    """``do_bench``, which finds all configurations alike, so that the first is taken. Its buffer
    stays with the allocator."""
    constructors.empty(_CACHE_BYTES // 4, dtype=torch.int, device=CUDA)
    return 1.0 if quantiles is None else [1.0] * len(quantiles)


class _Driver:
    """Triton's driver for the simulated GPU, as far as Python asks it."""

    def __init__(self, engine: Engine, target: Any) -> None:
        self._engine, self._target = engine, target
        self.utils = SimpleNamespace(get_device_properties=self._properties)

    def get_current_target(self) -> Any:
        major, minor = self._engine.gpu.capability
        return self._target("cuda", major * 10 + minor, 32)

    def get_device_capability(self, device: Any = None) -> tuple[int, int]:
        return torch.cuda.get_device_capability(device)

    def get_current_device(self) -> int:
        return 0

    def set_current_device(self, device: Any) -> None:
        torch.cuda.set_device(device)

    def get_current_stream(self, device: Any = None) -> int:
        return self._engine.memory.stream

    def get_active_torch_device(self) -> torch.device:
        return CUDA

    def get_device_interface(self) -> Any:
        return torch.cuda

    def get_benchmarker(self) -> Any:
        return _measure

    def get_empty_cache_for_benchmark(self) -> torch.Tensor:
        return constructors.empty(_CACHE_BYTES // 4, dtype=torch.int, device=CUDA)

    def clear_cache(self, cache: torch.Tensor) -> None:
        cache.zero_()

    def _properties(self, device: Any = 0) -> dict[str, int]:
        """Clocks in kHz, memory in bytes."""
        properties: Any = torch.cuda.get_device_properties(device)
        bandwidth = self._engine.gpu.bandwidth_bytes_per_s
        return {
            "max_shared_mem": properties.shared_memory_per_block_optin,
            "max_num_regs": properties.regs_per_multiprocessor,
            "multiprocessor_count": properties.multi_processor_count,
            "warpSize": properties.warp_size,
            "sm_clock_rate": properties.clock_rate,
            "mem_clock_rate": int(bandwidth * 8 / (2 * _BUS_BITS * 1e3)),
            "mem_bus_width": _BUS_BITS,
        }
