"""``Autotuner`` and ``Heuristics``: which configuration is taken, and how it is passed on."""

from __future__ import annotations

from typing import Any

from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface


class Config:
    def __init__(self, kwargs: dict[str, Any], num_warps: int = 4, pre_hook: Any = None) -> None:
        self.kwargs, self.num_warps, self.pre_hook = kwargs, num_warps, pre_hook

    def all_kwargs(self) -> dict[str, Any]:
        return {**self.kwargs, "num_warps": self.num_warps}


class Autotuner(KernelInterface):
    def __init__(
        self, fn: Any, arg_names: list[str], configs: list[Config], key: list[str], **_: Any
    ) -> None:
        self.fn, self.arg_names, self.configs, self.keys = fn, arg_names, configs, key
        self.cache: dict[Any, Config] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        named = dict(zip(self.arg_names, args, strict=False))
        key = tuple(named[each] for each in self.keys)
        if key not in self.cache:
            measure = driver.active.get_benchmarker()
            times = {each: measure(lambda: None, quantiles=(0.5, 0.2)) for each in self.configs}
            self.cache[key] = min(times, key=lambda each: times[each])
        config = self.cache[key]
        if config.pre_hook is not None:
            config.pre_hook({**named, **kwargs, **config.all_kwargs()})
        return self.fn.run(*args, **kwargs, **config.all_kwargs())


class Heuristics(KernelInterface):
    def __init__(self, fn: Any, arg_names: list[str], values: dict[str, Any]) -> None:
        self.fn, self.arg_names, self.values = fn, arg_names, values

    def run(self, *args: Any, **kwargs: Any) -> Any:
        for name, heuristic in self.values.items():
            named = dict(zip(self.arg_names, args, strict=False))
            kwargs[name] = heuristic({**named, **kwargs})
        return self.fn.run(*args, **kwargs)
