"""Trains, then looks at everything that was replaced in this process as a script could: prints what
differs from the original, as JSON."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import json
import os
import pickle
import subprocess
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

#: What says how a function is called and what it is for.
LOOKED_AT = ("__doc__", "__defaults__", "__kwdefaults__", "__name__", "__text_signature__")


def main() -> None:
    model = torch.nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scaler = torch.amp.GradScaler(enabled=False)
    for (batch,) in DataLoader(TensorDataset(torch.ones(16, 4)), batch_size=4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = model(batch).sum()
        scaler.scale(loss).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        optimizer.zero_grad()
        optimizer.step()
    seen = look()
    print(json.dumps(seen))
    sys.stdout.flush()
    os.abort()  # what a simulated run printed is shown where it ends unexpectedly


def look() -> dict[str, list[str]]:
    """Places of what is replaced now, and what differs there."""
    found, pickles = [], {}
    for owner, name, original in replaced():
        place = f"{getattr(owner, '__qualname__', owner.__name__)}.{name}"
        now = getattr(owner, name)
        found += [f"{place}: {each}" for each in differences(now, original)]
        if not callable(original) or isinstance(original, type):
            continue
        with_its_name = pickled(now)
        if with_its_name is None:
            found.append(f"{place}: cannot be pickled")
            continue
        pickles[place] = with_its_name.hex()
        if pickle.loads(with_its_name) is not now and not same_method(
            pickle.loads(with_its_name), now
        ):
            found.append(f"{place}: pickled as another")
        if copy.deepcopy(now) is not now and not inspect.ismethod(now):
            found.append(f"{place}: copied as another")
        pickle.loads(pickle.dumps(functools.partial(now, 1)))
    return {"places": sorted(pickles), "found": found + elsewhere(pickles)}


def replaced() -> list[Any]:
    """Of modules and classes, by what is live now."""
    sets = [each for each in gc.get_objects() if type(each).__name__ == "PatchSet"]
    oldest: dict[tuple[int, str], Any] = {}
    for each in (one for of in sets for one in of.replaced):
        if inspect.ismodule(each.owner) or inspect.isclass(each.owner):
            oldest.setdefault((id(each.owner), each.name), each)
    return [each for each in oldest.values() if not each.name.startswith("__module")]


def differences(now: Any, original: Any) -> list[str]:
    found = []
    if isinstance(original, classmethod | staticmethod):
        original = original.__func__
        now = getattr(now, "__func__", now)
    if not callable(original) or isinstance(original, type):
        return found
    if signature(now) != signature(original):
        found.append(f"signature {signature(now)} instead of {signature(original)}")
    kept = LOOKED_AT if inspect.isfunction(original) and hooked(now) else ("__doc__", "__name__")
    for each in kept:
        if getattr(now, each, None) != getattr(original, each, None):
            found.append(f"{each} is {getattr(now, each, None)!r}")
    if inspect.isfunction(original) and source(now) != source(original):
        found.append("another source")
    return found


def hooked(now: Any) -> bool:
    """Is it the same object as before, which calls ours?"""
    return bool(getattr(now, "__code__", None)) and "_trainfit_args" in now.__code__.co_varnames


def signature(function: Any) -> str:
    try:
        return str(inspect.signature(function))
    except (ValueError, TypeError):
        return "none"


def source(function: Any) -> str:
    try:
        return inspect.getsource(function)
    except (OSError, TypeError):
        return "none"


def pickled(value: Any) -> bytes | None:
    try:
        return pickle.dumps(value)
    except Exception:
        return None


def same_method(one: Any, other: Any) -> bool:
    return getattr(one, "__func__", one) == getattr(other, "__func__", other)


def elsewhere(pickles: dict[str, str]) -> list[str]:
    """What a process without trainfit cannot load."""
    program = (
        "import json, pickle, sys, torch, torch.distributed\n"
        "sys.modules['trainfit'] = None\n"
        "for place, text in json.load(sys.stdin).items():\n"
        "    try: pickle.loads(bytes.fromhex(text))\n"
        "    except Exception as error: print(place, error)\n"
    )
    clean = {name: value for name, value in os.environ.items() if "TRAINFIT" not in name}
    # Of the tests' own only what hastens the import of PyTorch.
    first = clean.pop("PYTHONPATH", "").split(os.pathsep)[0]
    clean |= {"PYTHONPATH": first} if first.endswith("quick_start") else {}
    done = subprocess.run(
        [sys.executable, "-c", program],
        input=json.dumps(pickles), env=clean, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return [f"elsewhere: {line}" for line in done.stdout.splitlines()]


if __name__ == "__main__":
    main()
