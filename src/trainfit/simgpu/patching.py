"""Reversible replacement of attributes of modules and classes, also of modules imported later,
and what ends it in forked children."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from types import BuiltinFunctionType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final, NamedTuple

_ABSENT = object()
#: Stands for the hook among the constants of the code below, and for the list of its shortcut.
_HOOK: Final = "trainfit: the hook"
_FLAG: Final = "trainfit: the flag"
#: An attribute of a hook that has little to do in most calls: an object that is hashable (code is
#: by what its constants are), and lines of code that do it instead where its ``is_on`` is true.
#: They stand in the code of the hooked function itself, and save the frame of the hook. Its
#: arguments are ``self``, ``_trainfit_args`` and ``_trainfit_kwargs``.
SHORTCUT: Final = "trainfit_shortcut"
#: Callables that are pickled by a name, or not at all. Others tell how they are.
_CALLED: Final = (FunctionType, MethodType, BuiltinFunctionType, functools.partial, type)


#: In the name of a file, it has warnings pass over its frames (CPython's `is_internal_frame`,
#: `Python/_warnings.c`): ``stacklevel`` counts the script's, as without the hook.
_UNSEEN: Final = ":importlib._bootstrap"


class Replacement(NamedTuple):
    """What was replaced: ``original`` is what stood at ``owner.name``, callable as it was."""

    owner: Any
    name: str
    original: Any


class PatchSet:
    """Replaces attributes and puts every one of them back, in reverse order; ends what else was
    hooked together with them (:meth:`on_restore`).

    Only what an object holds in its *own* namespace counts as its former value: an
    attribute that it inherited is deleted again, not frozen into the object.
    """

    def __init__(self) -> None:
        self._saved: list[tuple[Replacement, Callable[[], None]]] = []
        self._presented: dict[int, tuple[Any, Any, Any]] = {}
        self._ends: list[Callable[[], object]] = []

    @property
    def replaced(self) -> tuple[Replacement, ...]:
        """What is replaced now, the oldest first."""
        return tuple(replacement for replacement, _ in self._saved)

    def hook(
        self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]
    ) -> None:
        """Have ``make(original)`` called wherever the function ``owner.name`` is.

        ``original`` is the function as it was, to be called by the hook; of a class method or a
        static one it is the plain function.
        """
        held = vars(owner).get(name)
        function = held.__func__ if isinstance(held, classmethod | staticmethod) else held
        if type(function) is FunctionType:
            self._hook(owner, name, function, make)
        else:
            self.set(owner, name, make(getattr(owner, name)))

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set ``owner.name`` to ``value`` and remember what was there."""
        held = vars(owner).get(name, _ABSENT)
        original = getattr(owner, name, None) if held is _ABSENT else held

        def put_back() -> None:
            if held is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, held)

        self._saved.append((Replacement(owner, name, original), put_back))
        setattr(owner, name, self._present(owner, name, original, value))

    def when_imported(self, name: str, patch: Callable[[ModuleType], None]) -> None:
        """Have ``patch`` called with the module ``name``, now or as soon as it is imported."""
        hook = ImportHook(name, patch)
        self.on_restore(hook.remove)
        hook.install()

    def on_restore(self, *ends: Callable[[], object]) -> None:
        """Have these called when everything is put back: what takes away PyTorch's own hooks."""
        self._ends += ends

    def see_calls(
        self, before: Callable[..., Any], after: Callable[..., Any], *, with_kwargs: bool = False
    ) -> None:
        """Have these called before and after each call of any module, also of one that raises;
        ``with_kwargs``: ``after`` gets the call's keywords, too."""
        from torch.nn.modules import module  # late, as of inspect below

        self.on_restore(
            module.register_module_forward_pre_hook(before).remove,
            module.register_module_forward_hook(
                after, with_kwargs=with_kwargs, always_call=True
            ).remove,
        )

    def see_steps(self, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        """Have these called before and after each step of any optimizer."""
        from torch.optim import optimizer

        self.on_restore(
            optimizer.register_optimizer_step_pre_hook(before).remove,
            optimizer.register_optimizer_step_post_hook(after).remove,
        )

    def see_collections(
        self, clock: Callable[[], float], starts: deque[float], stops: deque[float]
    ) -> None:
        """Have the time put into these at each begin and end of a garbage collection.

        No instruction of Python runs in these calls: a Ctrl-C that comes during a collection would
        be raised in it, and Python drops what a callback raises.
        """
        marks = {"start": property(_noting(clock, starts)), "stop": property(_noting(clock, stops))}
        # callback(phase, info) is getattr(marks, phase, info): the attribute notes the time.
        called = functools.partial(getattr, type("CollectorMarks", (), marks)())
        gc.callbacks.append(called)

        def leave() -> None:
            with contextlib.suppress(ValueError):  # the script may have emptied the list
                gc.callbacks.remove(called)

        self.on_restore(leave)

    def restore(self) -> None:
        """Put back everything that was replaced, and wait for no import; safe to call twice."""
        while self._ends:
            self._ends.pop()()
        while self._saved:
            self._saved.pop()[1]()
        self._presented.clear()

    # -- functions of Python -------------------------------------------------------------------

    def _hook(
        self,
        owner: Any,
        name: str,
        function: FunctionType,
        make: Callable[[Callable[..., Any]], Callable[..., Any]],
    ) -> None:
        import inspect  # late: the start of every process of a watched command imports this module

        code, before = function.__code__, {**vars(function)}
        original = _copy(function)
        hook: Any = _unseen(make(original))
        given: dict[str, Any] = {}
        if "__wrapped__" not in before:  # else that is where its signature comes from, as before
            given["__wrapped__"] = original
            with contextlib.suppress(ValueError, TypeError):
                given["__signature__"] = inspect.signature(original)
        if hasattr(hook, "_torchdynamo_inline"):
            given["_torchdynamo_inline"] = hook._torchdynamo_inline

        def put_back() -> None:
            function.__code__ = code
            for each in given:
                if each in before:
                    setattr(function, each, before[each])
                else:
                    vars(function).pop(each, None)

        self._saved.append((Replacement(owner, name, original), put_back))
        vars(function).update(given)
        function.__code__ = _calling(hook, function)

    # -- anything else -------------------------------------------------------------------------

    def _present(self, owner: Any, name: str, original: Any, value: Any) -> Any:
        """``value`` as it stands at ``owner.name``: named by that place, like ``original``."""
        place = _place(owner)
        if place is None:
            return value
        module, qualname = place[0], f"{place[1]}{name}"
        if isinstance(value, classmethod | staticmethod):
            inner = self._present(owner, name, _plain(original), value.__func__)
            return type(value)(inner)
        if isinstance(value, type) and (original is None or isinstance(original, type)):
            self._name_class(value, module, qualname)
            return value
        if not isinstance(value, _CALLED):
            return value
        # An object may stand for several: where they were one, they still are.
        _, stood_for, known = self._presented.get(id(value), (None, _ABSENT, None))
        if stood_for is original and original is not None:
            return known
        shown = _copy(value) if isinstance(value, FunctionType) else _function(value)
        if callable(original) and not isinstance(original, type):
            functools.update_wrapper(shown, original)
        # Pickle goes by the qualified name; what PyTorch has by another name in C keeps that.
        shown.__module__, shown.__qualname__ = module, qualname
        own = None if isinstance(original, type) else getattr(original, "__name__", None)
        shown.__name__ = own if isinstance(own, str) else name
        for each in (value, shown):
            self._presented[id(each)] = each, original, shown
        return shown

    def _name_class(self, kind: type, module: str, qualname: str) -> None:
        """A class of ours that stands for one of PyTorch's."""
        before = kind.__module__, kind.__qualname__
        if before[0].partition(".")[0] != __name__.partition(".")[0]:
            return

        def put_back() -> None:
            kind.__module__, kind.__qualname__ = before

        self._saved.append((Replacement(kind, "__module__", before[0]), put_back))
        kind.__module__, kind.__qualname__ = module, qualname


class LocalHook:
    """A hook on a module of the user's. Copies of the module, in memory or in a file, have one that
    does nothing in its place, and need no trainfit to be loaded."""

    def __init__(self, called: Callable[..., Any]) -> None:
        self._called = called

    def __call__(self, *args: Any) -> Any:
        return self._called(*args)

    def __reduce__(self) -> Any:
        # A callable of Python's own that takes any arguments and returns None.
        return getattr, (contextlib.nullcontext(), "__exit__")


#: Collections between two looks that are kept; those before them are not told.
_MOST_COLLECTIONS: Final = 1 << 12


class CollectionTimes:
    """Begins and ends of garbage collections, as :meth:`PatchSet.see_collections` notes them."""

    def __init__(self) -> None:
        self.starts: deque[float] = deque(maxlen=_MOST_COLLECTIONS)
        self.stops: deque[float] = deque(maxlen=_MOST_COLLECTIONS)

    def pauses(self) -> Iterator[float]:
        """Seconds of each since the last such look, one by one: one may come in between. The end of
        a collection belongs to the last start before it."""
        while self.stops:
            stop = self.stops.popleft()
            if self.starts and self.starts[0] <= stop:
                yield stop - self.starts.popleft()

    def take(self) -> float:
        """Seconds of all since the last such look."""
        return sum(self.pauses())


def _noting(clock: Callable[[], float], times: deque[float]) -> Callable[..., None]:
    """What puts the time into a queue, whatever it is called with, and is no Python code."""
    every = map(times.append, iter(clock, None))
    return functools.partial(next, every)


def _place(owner: Any) -> tuple[str, str] | None:
    """Module and beginning of the qualified name of what ``owner`` holds; ``None``: nothing in it
    is pickled by its name."""
    if isinstance(owner, ModuleType):
        return owner.__name__, ""
    return (owner.__module__, f"{owner.__qualname__}.") if isinstance(owner, type) else None


def _plain(held: Any) -> Any:
    return held.__func__ if isinstance(held, classmethod | staticmethod) else held


def _copy(function: FunctionType) -> FunctionType:
    copied = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copied.__kwdefaults__ = function.__kwdefaults__ and {**function.__kwdefaults__}
    copied.__module__, copied.__qualname__ = function.__module__, function.__qualname__
    copied.__doc__, copied.__annotations__ = function.__doc__, {**function.__annotations__}
    vars(copied).update(vars(function))
    return copied


def _function(called: Callable[..., Any]) -> FunctionType:
    """A plain function that calls another callable: those are not pickled by their names."""

    def function(*args: Any, **kwargs: Any) -> Any:
        return called(*args, **kwargs)

    assert isinstance(function, FunctionType)
    return function


def _unseen(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A hook whose own frame warnings pass over; not where a debugger or coverage goes by files."""
    if sys.gettrace() is not None:
        return hook
    if type(hook) is FunctionType and not hook.__code__.co_filename.endswith(_UNSEEN):
        name = hook.__code__.co_filename + _UNSEEN
        hook.__code__ = hook.__code__.replace(co_filename=name)
    return hook


def _calling(hook: Callable[..., Any], function: FunctionType) -> CodeType:
    """Code for ``function`` that calls ``hook``; it lies where the hook does, so that whoever
    leaves out the frames of our files (tracebacks, torch.compile) leaves out this one, too."""
    code = function.__code__
    flag, lines = getattr(hook, SHORTCUT, (None, ()))
    template = _template(code.co_freevars, _is_method(code), lines)
    place: Any = getattr(hook, "__code__", template)
    stands_for = {_HOOK: hook, _FLAG: flag}
    return template.replace(
        co_consts=tuple(
            stands_for.get(const, const) if isinstance(const, str) else const
            for const in template.co_consts
        ),
        co_filename=place.co_filename,
        co_firstlineno=place.co_firstlineno,
        co_name=code.co_name,
        co_qualname=code.co_qualname,
    )


def _is_method(code: CodeType) -> bool:
    """Is its first argument called self?"""
    return bool(code.co_argcount) and code.co_varnames[0] == "self"


@functools.cache
def _template(free: tuple[str, ...], has_self: bool, shortcut: tuple[str, ...]) -> CodeType:
    """Code that calls a constant; a function's new code has as many free variables as its old.

    A method's has its ``self``: PyTorch's profiler takes it from the frames of ``Module.__call__``
    where it records stacks, and crashes without it (`torch/csrc/autograd/profiler_python.cpp`).
    """
    names = ", ".join(free)
    own = "self, " if has_self else ""
    lines = [
        "def outer():",
        f"    {' = '.join([*free, '_'])} = None",
        f"    def calling({own}*_trainfit_args, **_trainfit_kwargs):",
        *(
            [f"        _trainfit_flag = {_FLAG!r}", "        if _trainfit_flag.is_on:"]
            * bool(shortcut)
        ),
        *(f"            {line}" for line in shortcut),
        f"        _trainfit_hook = {_HOOK!r}",
        f"        return _trainfit_hook({own}*_trainfit_args, **_trainfit_kwargs)",
        f"        ({names})",
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = compile("\n".join(lines), __file__, "exec")
    return _inner(_inner(made))


def _inner(code: CodeType) -> CodeType:
    return next(const for const in code.co_consts if isinstance(const, CodeType))


# ---
# Calls back when a module has been imported, if it ever is.


class ImportHook(importlib.abc.MetaPathFinder):
    """Calls ``seen`` with the module ``name``: now where it is imported already, else as soon as
    it has been."""

    def __init__(self, name: str, seen: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._seen = seen
        self._busy = False

    def install(self) -> None:
        """Watch from now on, until :meth:`remove`."""
        if self._name in sys.modules:
            self._seen(sys.modules[self._name])
        else:
            sys.meta_path.insert(0, self)

    def remove(self) -> None:
        """Stop watching; safe to call twice."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)

    def find_spec(
        self, name: str, path: Any = None, target: Any = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The other finders' spec of the module, whose loader calls us when it is done."""
        if name != self._name or self._busy:
            return None
        self._busy = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._busy = False
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            loader = spec.loader

            def exec_module(module: ModuleType) -> None:
                vars(loader).pop("exec_module", None)  # it stays in the module's __spec__
                execute(module)
                if self in sys.meta_path:
                    self._seen(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# ---
# Switches the simulation off in forked children: a loader's workers simulate nothing.


_hooks: list[weakref.WeakMethod[Callable[[], None]]] = []
_registered = False
_inherits = False


@contextlib.contextmanager
def inherited() -> Iterator[None]:
    """Children that are forked inside go on with the simulation."""
    global _inherits
    before, _inherits = _inherits, True
    try:
        yield
    finally:
        _inherits = before


def in_child(method: Callable[[], None]) -> None:
    """Call ``method`` in every child that is forked from now on, as long as its object lives."""
    global _registered
    _hooks[:] = [hook for hook in _hooks if hook() is not None]
    _hooks.append(weakref.WeakMethod(method))
    if not _registered:
        _registered = True
        os.register_at_fork(after_in_child=_after_fork)


def _after_fork() -> None:
    if _inherits:
        return
    for hook in _hooks:
        method = hook()
        if method is not None:
            method()
