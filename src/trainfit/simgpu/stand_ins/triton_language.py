"""Triton where it is not installed: its Python interface, as far as launches of kernels need it.

Kernels are not compiled: `simgpu/operators/triton_kernels.py` takes their launches. What is here
is as of Triton 3.5 (``runtime/jit.py``, ``runtime/autotuner.py``, ``runtime/driver.py``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from trainfit.simgpu.stand_ins.absent import AbsentPackage

# --- triton.runtime -------------------------------------------------------------------------------


class KernelInterface:
    """What is launched by ``kernel[grid](…)``."""

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch it."""
        raise NotImplementedError("run not implemented")

    def warmup(self, *args: Any, grid: Any, **kwargs: Any) -> Any:
        """Compile it, and launch nothing."""
        return self.run(*args, grid=grid, warmup=True, **kwargs)

    def __getitem__(self, grid: Any) -> Any:
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


class JITFunction(KernelInterface):
    """A kernel without its compiler."""

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.fn = fn
        self.__name__, self.__doc__ = fn.__name__, fn.__doc__
        self.arg_names = list(inspect.signature(fn).parameters)
        self.pre_run_hooks: list[Any] = []

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """There is no GPU outside of a simulation."""
        raise RuntimeError("libcuda.so cannot found!")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("Cannot call @triton.jit'd outside of the scope of a kernel")


class Config:
    """A kernel's configuration: its constants, and how it is launched."""

    def __init__(
        self,
        kwargs: dict[str, Any],
        num_warps: int = 4,
        num_stages: int = 3,
        num_ctas: int = 1,
        maxnreg: int | None = None,
        pre_hook: Any = None,
        **_: Any,
    ) -> None:
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages
        self.pre_hook = pre_hook

    def all_kwargs(self) -> dict[str, Any]:
        """What a launch is given."""
        return {**self.kwargs, "num_warps": self.num_warps, "num_stages": self.num_stages}


class Autotuner(KernelInterface):
    """Measures the configurations for each key, and takes the fastest."""

    def __init__(
        self,
        fn: Any,
        arg_names: list[str],
        configs: Sequence[Config],
        key: Sequence[str],
        **options: Any,
    ) -> None:
        self.fn, self.arg_names, self.keys = fn, arg_names, key
        self.configs = list(configs) or [Config({})]
        self.base_fn = fn
        self.cache: dict[Any, Config] = {}
        prune = options.get("prune_configs_by") or {}
        self._prune = prune.get("early_config_prune")

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel with the configuration of this key."""
        named = {**dict(zip(self.arg_names, args, strict=False)), **kwargs}
        key = tuple(named.get(each) for each in self.keys)
        if key not in self.cache:
            configs = self.configs
            if self._prune is not None:
                configs = list(self._prune(configs, named, **kwargs))
            if len(configs) > 1:
                measure = DRIVER.active.get_benchmarker()
                times = [(measure(lambda: None, quantiles=(0.5, 0.2)), each) for each in configs]
                configs = [min(times, key=lambda each: each[0])[1]]
            self.cache[key] = configs[0]
        config = self.cache[key]
        if config.pre_hook is not None:
            config.pre_hook({**named, **config.all_kwargs()})
        return self.fn.run(*args, **{**kwargs, **config.all_kwargs()})


class Heuristics(KernelInterface):
    """Computes some of a kernel's arguments from the others."""

    def __init__(self, fn: Any, arg_names: list[str], values: Mapping[str, Any]) -> None:
        self.fn, self.arg_names, self.values = fn, arg_names, values

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Run the kernel with the values of the heuristics."""
        for name, heuristic in self.values.items():
            named = dict(zip(self.arg_names, args, strict=False))
            kwargs[name] = heuristic({**named, **kwargs})
        return self.fn.run(*args, **kwargs)


class DriverConfig:
    """The driver's configuration; without a GPU no driver is active."""

    def __init__(self) -> None:
        self._active: Any = None

    @property
    def active(self) -> Any:
        """The driver."""
        if self._active is None:
            raise RuntimeError("0 active drivers ([]). There should only be one.")
        return self._active


class GPUTarget(NamedTuple):
    """What is compiled for."""

    backend: str
    arch: int
    warp_size: int


DRIVER: Final = DriverConfig()


# --- triton ---------------------------------------------------------------------------------------


def jit(fn: Any = None, **_: Any) -> Any:
    """Make a kernel of a function, or what does."""
    return JITFunction if fn is None else JITFunction(fn)


def autotune(configs: Sequence[Config], key: Sequence[str], **options: Any) -> Any:
    """Decorate a kernel."""
    return lambda fn: Autotuner(fn, fn.arg_names, configs, key, **options)


def heuristics(values: Mapping[str, Any]) -> Any:
    """Decorate a kernel."""
    return lambda fn: Heuristics(fn, fn.arg_names, values)


def cdiv(x: int, y: int) -> int:
    """Quotient, rounded up."""
    return -(-x // y)


def next_power_of_2(n: int) -> int:
    """The smallest that is not below ``n``."""
    return int(1 << max(0, n - 1).bit_length())


def _no_gpu(fn: Any, quantiles: Any = None, **_: Any) -> Any:
    raise RuntimeError("no GPU to measure on")


# --- triton.language ------------------------------------------------------------------------------


class Name:
    """What stands for a function, a type or a constant that only a kernel's source names."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __repr__(self) -> str:
        return self.name

    def __call__(self, *args: Any, **_: Any) -> Any:
        return args[0] if args else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Name(f"{self.name}.{name}")


class Constexpr:
    """``constexpr``: a value that is known when a kernel is compiled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __class_getitem__(cls, _: Any) -> Any:
        return cls


class _Descriptor:
    """``TensorDescriptor`` of ``triton.tools``."""

    def __init__(self, base: Any, shape: Any, strides: Any, block_shape: Any, **_: Any) -> None:
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape

    @classmethod
    def from_tensor(cls, tensor: Any, block_shape: Any, **_: Any) -> Any:
        """A descriptor of the whole tensor."""
        return cls(tensor, tensor.shape, tensor.stride(), block_shape)


def _named(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return Name(name)


def _parts() -> Mapping[str, Mapping[str, Any]]:
    kernels = {"KernelInterface": KernelInterface, "JITFunction": JITFunction}
    tuned = {"Autotuner": Autotuner, "Config": Config, "Heuristics": Heuristics}
    measuring = {"do_bench": _no_gpu, "do_bench_cudagraph": _no_gpu}
    language = {"constexpr": Constexpr, "__getattr__": _named}
    runtime = {**kernels, **tuned, "driver": DRIVER}
    decorators = {"jit": jit, "autotune": autotune, "heuristics": heuristics, "Config": Config}
    functions = {"cdiv": cdiv, "next_power_of_2": next_power_of_2}
    return {
        "triton": {
            **decorators,
            **functions,
            "JITFunction": JITFunction,
            "driver": DRIVER,
            "runtime": SimpleNamespace(**runtime),
        },
        "triton.runtime": runtime,
        "triton.runtime.jit": kernels,
        "triton.runtime.autotuner": tuned,
        "triton.runtime.driver": {"driver": DRIVER},
        "triton.testing": measuring,
        "triton.backends": {},
        "triton.backends.compiler": {"GPUTarget": GPUTarget},
        "triton.language": language,
        "triton.language.core": language,
        "triton.language.math": language,
        "triton.language.extra": {},
        "triton.language.extra.libdevice": language,
        "triton.language.extra.cuda": {},
        "triton.language.extra.cuda.libdevice": language,
        "triton.tools": {},
        "triton.tools.tensor_descriptor": {"TensorDescriptor": _Descriptor},
    }


TRITON: Final = AbsentPackage(
    "triton", "3.5.0", _parts, "its kernels are not compiled, their launches are counted"
)
