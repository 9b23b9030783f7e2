"""Makes the JSON Schemas of this folder from the types of the result files (src/trainfit/results).

    python docs/schema/make.py

One file for each kind of result, of its present version; what the fields mean is in the types'
docstrings, which become descriptions. "unit" is the unit of a number (of each of the numbers, in a
list or an object). pydantic turns the types into schemas.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import itertools
import json
import pkgutil
import sys
import textwrap
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

import trainfit.results
from trainfit.results.files.documents import WRITTEN_BY, ResultFile

FOLDER: Final = Path(__file__).parent
_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
_SUFFIXES: Final = {
    "bytes_per_s": "bytes/s", "flops_per_s": "FLOP/s", "bytes_per_step": "bytes/step",
    "flops_per_sample": "FLOP/sample", "flop_per_byte": "FLOP/byte", "flop_per_joule": "FLOP/J",
    "samples_per_joule": "samples/J", "s_per_billion": "s/10^9 parameters",
    "samples_per_unit": "samples/unit of currency", "per_hour": "currency/h", "per_s": "1/s",
    "per_batch": "1/batch", "per_epoch": "1/epoch", "per_step": "1/step", "share": "share (0 to 1)",
    "shares": "share (0 to 1)", "percent": "%", "bytes": "bytes", "seconds": "s", "flops": "FLOP",
    "joule": "J", "hz": "Hz", "us": "us", "ms": "ms", "ns": "ns", "mib": "MiB", "ratio": "factor",
    "s": "s", "w": "W", "c": "degrees Celsius",
}  # fmt: skip
#: Of numbers whose names do not say it.
_UNITS: Final = {
    "s": "p50 p95 p99 most bad_samples slow_samples started_monotonic started_unix",
    "Hz": "hz_range",
    "bytes": "nbytes allocated cached beyond others free",
    "bytes/step": "growth_interval",
    "samples": "batch_size best best_from best_to data_set effective_batch evaluation flat_from "
               "evaluation_batch_size failed_batches "
               "flat_to knee largest_batch micro_batch noise_scale recommended_batch reference "
               "run_batch samples samples_now trains memory",
    "batches": "batches dropped epoch_batches evaluation_batches first_batch loader_batches "
               "prefetch_factor settled accumulation",
    "units of the tunable": "present value largest recommended too_large limit",
    "steps": "every_steps epoch_steps made_for_steps most_steps of_steps kept_gradients used_again "
             "zero_rates "
             "steps_scaled freed_every "
             "last_step first_lost_step first_step trials light_steps out_of_memory_step "
             "period phase settled_from step steps steps_left_out steps_now steps_same_samples "
             "steps_seen steps_then steps_until_full steps_used",
    "epochs": "all_epochs epochs epochs_begun",
    "workers": "empty input_workers num_workers workers",
    "threads": "library_threads second_threads started_threads thread_pools threads worker_threads",
    "cores": "busy_cores cores cores_busy cuda_cores logical_cpus others_cores physical_cores "
             "quota_cores tensor_cores threads_cores usable_cores",
    "GPUs": "counts gpus",
    "ranks": "ranks world_size",
    "calls": "call calls first_call launches misses misses_collecting simulated_calls text_calls",
    "tokens": "known_tokens model_tokens new_tokens positions prompt_tokens proposed",
    "sequences": "sequences",
    "elements": "columns depth fill_elements fill_rows rows l2_elements longest_elements "
                "median_elements matmul_balance_size input_sizes",
    "currency": "budget cost",
    "factor": "small_eps vanished_rate rate reached beta1 beta2 core_speed core_speeds detectable "
              "effect efficiency eps_lost factor "
              "gain rate_factor scaling "
              "speed step_change tensor_speedup contention variation interval",
    "samples/step": "samples_per_step",
    "share (0 to 1)": "confidence disturbed fragmentation gpu_busy gpu_utilization mfu phases "
                      "throttled input_at_most input_range collecting "
                      "denormal",
    "as the object says": "after before high low value",
    "count": "adamw_parameters all_numbers assumptions batch_tensors blocks bus_bits count event "
             "events failures first_size last_size processes retries device_allocations_per_step "
             "files frozen loss_divisors looks of_looks looped_waits machines made passes rounds "
             "cells cheapest fastest best_per_unit "
             "made_again micro_batches dropped_micro_batches remainder optimized trained_numbers "
             "foreign "
             "link_width "
             "without_gradient "
             "link_width_max lost_rows looked_at open_files parameters refused_rows removed "
             "repeats sharing sm_count times trained_parameters tries",
    "index, code or identifier": "affinity capabilities capability code column cpus cuda devices "
        "exit_code gpu gpu_index gpu_pstate index line link_generation link_generation_max node "
        "numa_node pid rank shape tier version",
}  # fmt: skip
_UNIT_OF: Final = {key: unit for unit, keys in _UNITS.items() for key in keys.split()}


def main() -> int:
    for name, schema in schemas():
        (FOLDER / f"{name}.json").write_text(json.dumps(schema, indent=1) + "\n", "utf-8")
    return 0


def schemas() -> Iterator[tuple[str, dict[str, Any]]]:
    """The format's name and the schema of each kind of result file."""
    for module in pkgutil.walk_packages(trainfit.results.__path__, "trainfit.results."):
        importlib.import_module(module.name)
    for kind in sorted(_kinds(ResultFile), key=lambda kind: kind.FILE.name):
        yield kind.FILE.name, _schema(kind)


def _kinds(base: type[ResultFile]) -> Iterator[type[ResultFile]]:
    for kind in base.__subclasses__():
        if "FILE" in vars(kind):
            yield kind
        yield from _kinds(kind)


def _schema(kind: type[ResultFile]) -> dict[str, Any]:
    found = TypeAdapter(kind).json_schema(mode="serialization")
    whole = {name: part for name, part in found.items() if name != "$defs"}
    classes = {each.__name__: each for each in _reachable(kind)}
    parts = {kind.__name__: whole, **found.get("$defs", {})}
    for name, part in parts.items():
        _describe(part, _docstrings(classes[name]) if name in classes else {})
    head = {
        "format": {"const": kind.FILE.name},
        "version": {"const": kind.FILE.version},
        WRITTEN_BY: {"type": "string", "description": "the version of trainfit that wrote it"},
    }
    whole["properties"] = {**head, **whole["properties"]}
    whole["required"] = [*head, *whole.get("required", [])]
    defs = {name: part for name, part in sorted(parts.items()) if part is not whole}
    return {"$schema": _DIALECT, **whole, "$defs": defs}


def _describe(part: dict[str, Any], said: dict[str, str]) -> None:
    """Add units and descriptions to the fields of one object."""
    for key, value in part.get("properties", {}).items():
        value.pop("title", None)
        if key in said:
            value["description"] = said[key]
        if '"number"' in (text := json.dumps(value)) or '"integer"' in text:
            value["unit"] = unit(key)


def unit(key: str) -> str:
    """Of a key's numbers, by its last words; raises :class:`LookupError` where nothing says it."""
    if key in _UNIT_OF:
        return _UNIT_OF[key]
    words = key.split("_")
    for start in range(len(words)):
        if (suffix := "_".join(words[start:])) in _SUFFIXES:
            return _SUFFIXES[suffix]
    raise LookupError(f"no unit of {key!r}: give it one in {Path(__file__).name}")


def _reachable(kind: Any) -> set[type]:
    """The dataclasses that a type consists of."""
    found: set[type] = set()
    waiting = [kind]
    while waiting:
        each = waiting.pop()
        if dataclasses.is_dataclass(each) and isinstance(each, type) and each not in found:
            found.add(each)
            waiting += typing.get_type_hints(each).values()
        waiting += typing.get_args(each)
    return found


def _docstrings(kind: type) -> dict[str, str]:
    """The docstrings that follow a dataclass's fields, by field."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    said = {}
    for field, after in itertools.pairwise(tree.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            match after:
                case ast.Expr(ast.Constant(str() as text)):
                    said[field.target.id] = " ".join(text.split())
    return said


if __name__ == "__main__":
    sys.exit(main())
