"""Imported by Python itself when it starts: begins to record, then goes on to the user's own.

It is found through PYTHONPATH, in Pythons that have no trainfit, too: that is loaded from where
this file lies, without a word in ``sys.path``.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))


def _load_trainfit() -> None:
    if "trainfit" in sys.modules or importlib.util.find_spec("trainfit") is not None:
        return
    folder = os.path.abspath(os.path.join(_HERE, *[os.pardir] * 3))
    spec = importlib.util.spec_from_file_location(
        "trainfit", os.path.join(folder, "__init__.py"), submodule_search_locations=[folder]
    )
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["trainfit"] = module
        spec.loader.exec_module(module)


class _Lent:
    """The last of all finders: a module that the recorder needs, where trainfit has it, in a
    Python that has none (``TRAINFIT_WATCH_LENT`` is its name and its file)."""

    @staticmethod
    def find_spec(name, path=None, target=None):  # type: ignore[no-untyped-def]
        lent, _, file = os.environ.get("TRAINFIT_WATCH_LENT", "").partition("=")
        return importlib.util.spec_from_file_location(name, file) if name == lent else None


def _run_the_users() -> None:
    """The sitecustomize that Python would have imported without this one."""
    # The path is from now on what it is without us; processes that this one starts find us in the
    # environment.
    sys.path[:] = [each for each in sys.path if not each or os.path.abspath(each) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


try:
    if os.environ.get("TRAINFIT_WATCH", "") not in ("", "0"):
        _load_trainfit()
        sys.meta_path.append(_Lent)
        from trainfit.watch.recorder.process import from_environment

        from_environment()
except Exception as error:
    print(f"trainfit watch: not recorded: {error}", file=sys.stderr)
_run_the_users()
