"""What is replaced in the user's process: the user's code cannot tell, and it all comes back."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import itertools
import json
import os
import pickle
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainfit.simgpu.patching import CollectionTimes, LocalHook, PatchSet, Replacement
from trainfit.speed.cpu_run import cpu_for_cuda
from trainfit.torch_private.modules import Inside, fast_call
from trainfit.watch.recorder import cuda_hooks
from training_scripts.replaced import look


class Calls:
    """Counts the calls of what it hooks."""

    def __init__(self) -> None:
        self.count = 0

    def make(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            return original(*args, **kwargs)

        return hook


@pytest.fixture
def patches() -> Iterator[PatchSet]:
    made = PatchSet()
    yield made
    made.restore()


class Kind:
    """Methods of all kinds, a docstring and defaults."""

    def __init__(self, value: int = 1, *, more: int = 2) -> None:
        super().__init__()
        self.value = value + more

    @classmethod
    def of(cls, value: int) -> Kind:
        """A class method."""
        return cls(value)

    @staticmethod
    def twice(value: int) -> int:
        """A static method."""
        return 2 * value

    @property
    def half(self) -> float:
        return self.value / 2


class Sub(Kind):
    """Inherits everything."""


def test_what_else_was_hooked_ends_with_the_patches_and_once(patches: PatchSet) -> None:
    ended: list[str] = []
    patches.set(Kind, "twice", staticmethod(lambda value: ended.append("called")))
    patches.on_restore(lambda: ended.append("first"), lambda: ended.append("second"))
    patches.restore()
    patches.restore()
    assert ended == ["second", "first"] and Kind.twice(4) == 8


def test_calls_of_modules_and_steps_of_optimizers_are_seen_until_then(patches: PatchSet) -> None:
    seen: list[str] = []

    def note(word: str) -> Callable[..., None]:
        return lambda *_: seen.append(word)

    patches.see_calls(note("enters"), note("leaves"))
    patches.see_steps(note("steps"), note("stepped"))
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters())
    with pytest.raises(RuntimeError):
        layer(torch.ones(3))
    optimizer.step()
    assert seen == ["enters", "leaves", "steps", "stepped"]
    patches.restore()
    layer(torch.ones(2)), optimizer.step()
    assert len(seen) == 4


def test_a_hooked_function_is_the_one_that_everybody_holds(patches: PatchSet) -> None:
    """Those who took it before are hooked, too; those who took it meanwhile are not afterwards."""
    saved_before, partly, calls = torch.save, functools.partial(torch.save, {}), Calls()
    looked = vars(torch.save).copy()
    patches.hook(torch, "save", calls.make)
    assert torch.save is torch.serialization.save is saved_before
    for save in (torch.save, torch.serialization.save, saved_before, copy.deepcopy(torch.save)):
        save({}, io.BytesIO())
    partly(io.BytesIO())
    assert calls.count == 5
    for each in (torch.save, saved_before, partly, functools.partial(torch.save, {})):
        assert pickle.loads(pickle.dumps(each)) is not None
    assert pickle.loads(pickle.dumps(torch.save)) is saved_before
    patches.restore()
    torch.save({}, io.BytesIO())
    assert calls.count == 5 and vars(torch.save) == looked
    assert pickle.loads(pickle.dumps(saved_before)) is torch.save


def test_a_hooked_function_looks_as_before(patches: PatchSet) -> None:
    functions = ((torch, "save"), (Kind, "__init__"), (nn.utils, "clip_grad_norm_"))
    wrapping = {nn.utils.clip_grad_norm_}
    looks: tuple[Callable[[Any], Any], ...] = (
        inspect.signature, inspect.getsource, inspect.getdoc,
        lambda f: inspect.getfullargspec(f) if f not in wrapping else None,
        lambda f: (f.__name__, f.__qualname__, f.__module__, f.__defaults__, f.__kwdefaults__),
        lambda f: f.__code__.co_freevars,
    )  # fmt: skip
    before = [[look(getattr(*place)) for look in looks] for place in functions]
    for place in functions:
        patches.hook(*place, Calls().make)
    assert [[look(getattr(*place)) for look in looks] for place in functions] == before


def test_kinds_of_methods_stay_what_they_are(patches: PatchSet) -> None:
    calls = Calls()
    of, twice, init = vars(Kind)["of"], vars(Kind)["twice"], vars(Kind)["__init__"]
    for name in ("of", "twice", "__init__"):
        patches.hook(Kind, name, calls.make)
    assert type(Sub.of(3)) is Sub and Sub.of(3).value == 5  # of and __init__, twice
    assert Kind.twice(4) == Kind().twice(4) == 8
    assert calls.count == 7
    assert (vars(Kind)["of"], vars(Kind)["twice"]) == (of, twice)
    assert pickle.loads(pickle.dumps(Kind(7))).value == 9
    patches.restore()
    assert (vars(Kind)["of"], vars(Kind)["twice"], vars(Kind)["__init__"]) == (of, twice, init)
    assert Kind().value == 3 and calls.count == 8


def test_a_hook_on_what_is_inherited_is_the_subclasss_alone(patches: PatchSet) -> None:
    calls = Calls()
    patches.hook(Sub, "__init__", calls.make)
    Kind()
    assert calls.count == 0
    Sub()
    assert calls.count == 1
    patches.restore()
    assert "__init__" not in vars(Sub)


def test_hooks_of_two_sets_are_nested() -> None:
    outer, inner, one, two = PatchSet(), PatchSet(), Calls(), Calls()
    outer.hook(Kind, "__init__", one.make)
    inner.hook(Kind, "__init__", two.make)
    assert Kind(2).value == 4 and (one.count, two.count) == (1, 1)
    inner.restore()
    assert Kind(2).value == 4 and (one.count, two.count) == (2, 1)
    outer.restore()
    assert Kind(2).value == 4 and (one.count, two.count) == (2, 1)


def test_a_function_that_calls_itself_is_hooked_each_time(patches: PatchSet) -> None:
    calls = Calls()
    before = json.dumps({"a": [1]}, indent=1)
    patches.hook(json.encoder, "_make_iterencode", calls.make)
    patches.hook(json.JSONEncoder, "encode", calls.make)
    assert json.dumps({"a": [1]}, indent=1) == before
    assert calls.count == 2


@pytest.fixture
def own_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's own: a recorder that another test ran in this process has hooked it for good."""
    monkeypatch.setattr(sys, "exit", inspect.unwrap(sys.exit))


def test_functions_of_c_are_replaced_by_their_name(patches: PatchSet, own_exit: None) -> None:
    exit, cpu = sys.exit, torch.Tensor.cpu
    patches.hook(sys, "exit", Calls().make)
    patches.hook(torch.Tensor, "cpu", Calls().make)
    assert sys.exit is not exit and str(inspect.signature(sys.exit)) == "(status=None, /)"
    assert pickle.loads(pickle.dumps(sys.exit)) is sys.exit
    assert pickle.loads(pickle.dumps(torch.Tensor.cpu)) is torch.Tensor.cpu
    assert sys.exit.__doc__ == exit.__doc__ and torch.Tensor.cpu.__doc__ == cpu.__doc__
    with pytest.raises(ValueError, match="no signature"):
        inspect.signature(torch.Tensor.cpu)
    patches.restore()
    assert (sys.exit, torch.Tensor.cpu) == (exit, cpu) and "cpu" not in vars(torch.Tensor)


def test_one_object_for_several_names_is_pickled_as_each(patches: PatchSet) -> None:
    def nothing(*_: Any) -> None: ...

    for name in ("time", "monotonic"):
        patches.set(time, name, nothing)
    for name in ("monotonic", "time"):
        assert pickle.loads(pickle.dumps(vars(time)[name])) is vars(time)[name]
    assert nothing.__qualname__.endswith("nothing")
    # Where two names were one object, they still are.
    patches.set(torch.cuda, "mem_get_info", nothing)
    patches.set(torch.cuda.memory, "mem_get_info", nothing)
    assert torch.cuda.mem_get_info is torch.cuda.memory.mem_get_info


@pytest.mark.parametrize("value", [[].append, functools.partial(int, "4"), {}.get])
def test_callables_without_a_name_get_one(patches: PatchSet, value: Any) -> None:
    patches.set(torch.cuda, "device_count", value)
    assert pickle.loads(pickle.dumps(torch.cuda.device_count)) is torch.cuda.device_count


def test_what_is_replaced_can_be_asked_for(patches: PatchSet, own_exit: None) -> None:
    exit = sys.exit
    patches.hook(sys, "exit", Calls().make)
    assert patches.replaced == (Replacement(sys, "exit", exit),)
    patches.restore()
    assert patches.replaced == ()


class Off:
    """A recorder that records nothing."""

    live = False


@pytest.mark.parametrize("late", [pytest.param(False, marks=pytest.mark.slow), True])
def test_nothing_of_the_calls_of_cuda_shows(patches: PatchSet, late: bool) -> None:
    """On a build of PyTorch for the CPU they are hooked in no other test of this."""
    cuda_hooks.install(Off(), patches, late)  # type: ignore[arg-type]
    seen = look()
    assert seen["found"] == []
    assert {"Tensor.to", "Tensor.item", "Tensor.__bool__", "Tensor.__contains__"} <= {
        *seen["places"]
    }


def test_nothing_of_a_script_on_the_cpu_shows() -> None:
    with cpu_for_cuda():
        seen = look()
    assert seen["found"] == [] and {"torch.load", "torch.cuda.is_available"} <= {*seen["places"]}


@pytest.mark.slow
def test_a_module_with_a_hook_of_ours_is_copied_without_it() -> None:
    told: list[Any] = []
    module = nn.Linear(2, 2)
    module.register_forward_pre_hook(LocalHook(lambda *_: told.append(1)), with_kwargs=True)
    module.register_forward_hook(LocalHook(lambda *_: told.append(1)))
    copied = copy.deepcopy(module)
    assert torch.equal(copied(torch.ones(1, 2)), module(torch.ones(1, 2)))
    assert len(told) == 2
    program = (
        "import pickle, sys; sys.modules['trainfit'] = None; import torch\n"
        "print(pickle.load(sys.stdin.buffer)(torch.ones(1, 2)).shape)"
    )
    # Of our own only what hastens the import of PyTorch.
    clean = {**os.environ, "PYTHONPATH": os.environ["PYTHONPATH"].split(os.pathsep)[0]}
    done = subprocess.run(
        [sys.executable, "-c", program], input=pickle.dumps(module), capture_output=True, env=clean
    )
    assert done.stdout == b"torch.Size([1, 2])\n", done.stderr.decode()


PROFILED = """
import torch
from trainfit.simgpu.patching import PatchSet
PatchSet().hook(torch.nn.Module, "__call__", lambda original: lambda *a, **k: original(*a, **k))
net = torch.nn.Sequential(torch.nn.Linear(2, 2))
with torch.profiler.profile(with_stack=True) as profiler:
    net(torch.ones(1, 2))
print(sum("Linear" in str(event.name) for event in profiler.events()))
"""


@pytest.mark.slow
def test_pytorchs_profiler_finds_the_modules_of_a_hooked_call() -> None:
    done = subprocess.run([sys.executable, "-c", PROFILED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr  # without ``self`` in the frame it crashes
    assert int(done.stdout.split()[-1])


def test_a_hooked_method_takes_self_by_name() -> None:
    calls, patches = Calls(), PatchSet()
    patches.hook(nn.Module, "extra_repr", calls.make)
    try:
        assert nn.Module.extra_repr(self=nn.Identity()) == "" and calls.count == 1
    finally:
        patches.restore()


def test_a_warning_that_a_hooked_function_gives_is_the_callers() -> None:
    """PyTorch's losses warn of shapes that differ with the place of whoever called them."""
    patches = PatchSet()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def hook(*args: Any, **kwargs: Any) -> Any:
            return original(*args, **kwargs)

        return hook

    patches.hook(torch.nn.functional, "mse_loss", make)
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            torch.nn.functional.mse_loss(torch.ones(2, 1), torch.ones(2))  # here
    finally:
        patches.restore()
    (line,) = [n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1)
               if text.endswith("torch.ones(2))  # here")]  # fmt: skip
    assert [(each.filename, each.lineno) for each in told] == [(__file__, line)]


def _modules_called(patches: PatchSet) -> Inside:
    """Hooks calls of modules as watch does; whether one is within another."""
    inside = Inside()

    def make(original: Callable[..., Any]) -> Callable[..., Any]:
        def outermost(module: Any, args: Any, kwargs: Any) -> Any:
            inside.is_on = True
            try:
                return original(module, *args, **kwargs)
            finally:
                inside.is_on = False

        made = fast_call(original, inside, outermost)
        assert made is not None
        return made

    patches.hook(nn.Module, "__call__", make)
    return inside


def _frames_of(call: Callable[[], Any]) -> int:
    """Calls of Python functions."""
    frames = [0]

    def count(_: Any, event: str, __: Any) -> None:
        frames[0] += event == "call"

    sys.setprofile(count)
    try:
        call()
    finally:
        sys.setprofile(None)
    return frames[0]


def test_a_call_within_a_hooked_call_has_no_frame_more_than_without_the_hook() -> None:
    model, few = nn.Sequential(*[nn.Identity() for _ in range(20)]), nn.Sequential(nn.Identity())
    given = torch.ones(2)
    for each in (model, few):
        each(given)
    plain = _frames_of(lambda: model(given)) - _frames_of(lambda: few(given))
    patches = PatchSet()
    inside = _modules_called(patches)
    try:
        hooked = _frames_of(lambda: model(given)) - _frames_of(lambda: few(given))
        inside.is_on = True
        with pytest.raises(TypeError, match="forward"):
            few(given, given)
        inside.is_on = False
    finally:
        patches.restore()
    assert hooked == plain


def test_the_code_of_a_hooked_call_is_hashable_as_all_code_is() -> None:
    """Debuggers and profilers keep what they know of functions by their code, as our looks do."""
    patches = PatchSet()
    _modules_called(patches)
    try:
        code = nn.Module.__call__.__code__
        assert hash(code) == hash(code) and {code: 1}[code] == 1
    finally:
        patches.restore()


def test_a_hook_with_a_shortcut_is_not_taken_for_pytorchs_own_call() -> None:
    patches = PatchSet()
    _modules_called(patches)
    try:
        assert fast_call(nn.Module.__call__, Inside(), lambda *_: None) is None
    finally:
        patches.restore()
    assert fast_call(nn.Module.__call__, Inside(), lambda *_: None) is not None


def test_collections_that_come_while_their_times_are_added_up(patches: PatchSet) -> None:
    """A look makes objects itself: a collection begins within it."""
    times = CollectionTimes()
    ticks = itertools.count()
    patches.see_collections(ticks.__next__, times.starts, times.stops)
    threshold = gc.get_threshold()
    gc.set_threshold(1)
    try:
        seconds = sum(times.take() for _ in range(300) if [[]])
    finally:
        gc.set_threshold(*threshold)
    patches.restore()
    assert seconds + times.take() == next(ticks) // 2 > 0
