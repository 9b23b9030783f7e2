"""On PYTHONPATH of the processes that tests start: they import PyTorch and end in half of the CPU
time.

An import of PyTorch and of what its optimizers need makes half a million objects. Python looks
through them for cyclic garbage again and again meanwhile, and takes each apart at the end.

The first step of an optimizer imports PyTorch's compiler, a second of CPU time, to tell it
something about a graph that it compiles. Where nothing has imported the compiler there is none.
"""

import atexit
import builtins
import functools
import gc
import importlib.machinery
import sys

gc.set_threshold(1_500_000, 10, 10)
atexit.register(gc.freeze)

_COMPILER = "torch._dynamo"
#: Modules whose functions import the compiler when they are called.
_ASKING = ("torch._compile", "torch.optim.optimizer")


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
    """Loads a module of ``_ASKING`` with an ``__import__`` of its own."""

    def find_spec(self, name, path=None, target=None):
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


sys.meta_path.insert(0, _Finder())
