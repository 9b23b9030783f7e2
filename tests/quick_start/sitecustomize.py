"""On PYTHONPATH of the processes that tests start: they import PyTorch and end in half of the CPU
time.

An import of PyTorch and of what its optimizers need makes half a million objects. Python looks
through them for cyclic garbage again and again meanwhile, and takes each apart at the end.

The first step of an optimizer imports PyTorch's compiler, a second of CPU time, to tell it
something about a graph that it compiles. Where nothing has imported the compiler there is none.

Shapes of operators without data ("meta", "fake") are in part told in Python, a quarter of PyTorch's
import: they are imported when a simulation, a fake tensor or the compiler asks for them. A meta
tensor without these has no function for some operators, an error.
"""

import atexit
import builtins
import functools
import gc
import importlib
import importlib.machinery
import sys
import types

gc.set_threshold(1_500_000, 10, 10)
atexit.register(gc.freeze)

_COMPILER = "torch._dynamo"
#: Modules whose functions import the compiler when they are called.
_ASKING = ("torch._compile", "torch.optim.optimizer")
_SHAPES = "torch._meta_registrations"
#: Its imports, which it begins, for some import each other, and who imports those.
_WITH_SHAPES = (
    *("torch._decomp", "torch._prims", "torch._refs", "torch.utils._content_store"),
    *(_COMPILER, "torch._inductor"),
)
_shapes_asked = []


class _NoCompiler:
    """What of the compiler an optimizer calls."""

    def graph_break(self):
        pass

    def disable(self, fn, recursive=True, **more):
        told = None

        @functools.wraps(fn)
        def called(*args, **kwargs):
            nonlocal told
            if told is None and _COMPILER in sys.modules:
                told = sys.modules[_COMPILER].disable(fn, recursive, **more)
            return (told or fn)(*args, **kwargs)

        # In a traceback the compiler's own wrapper is PyTorch's, and no line of the user's.
        file = sys.modules["torch"].__file__
        called.__code__ = called.__code__.replace(co_filename=file)
        return called


class _WithoutCompiler:
    """The module ``torch``, with :class:`_NoCompiler`."""

    _dynamo = _NoCompiler()

    def __getattr__(self, name):
        return getattr(sys.modules["torch"], name)


def _import(name, *args, **kwargs):
    if name == _COMPILER and name not in sys.modules:
        return _WithoutCompiler()
    return builtins.__import__(name, *args, **kwargs)


class _Finder:
    """Loads a module of ``_ASKING`` with an ``__import__`` of its own, and ``_SHAPES`` later."""

    def find_spec(self, name, path=None, target=None):
        if name == _SHAPES and not _shapes_asked:
            return importlib.machinery.ModuleSpec(name, _Later())
        if name.startswith(_WITH_SHAPES) and isinstance(sys.modules.get(_SHAPES), _Empty):
            import_shapes()
            if name in sys.modules:
                return _Loaded(sys.modules[name]).spec
        if name not in _ASKING:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None:
            run = spec.loader.exec_module

            def exec_module(module):
                module.__dict__["__builtins__"] = {**vars(builtins), "__import__": _import}
                run(module)

            spec.loader.exec_module = exec_module
        return spec


class _Empty(types.ModuleType):
    """In the place of ``_SHAPES`` until somebody wants something of it."""

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(import_shapes(), name)


def import_shapes():
    _shapes_asked.append(True)
    if isinstance(sys.modules.get(_SHAPES), _Empty):
        del sys.modules[_SHAPES]
    return importlib.import_module(_SHAPES)


class _Later:
    """Loads an :class:`_Empty`."""

    def create_module(self, spec):
        return _Empty(spec.name)

    def exec_module(self, module):
        # What eager code needs of its imports: a generator can be made.
        make = getattr(sys.modules["torch"]._C, "_set_generator_metaclass", None)
        if make is not None:
            make(importlib.import_module("torch._opaque_base").OpaqueBaseMeta)


class _Loaded:
    """Loads a module that was imported while it was looked for; Python asks for its own spec."""

    def __init__(self, module):
        self.module, self.before = module, module.__spec__
        self.spec = module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, self)

    def create_module(self, spec):
        return self.module

    def exec_module(self, module):
        module.__spec__ = self.before


sys.meta_path.insert(0, _Finder())
