"""Experiment trackers whose arguments override the environment (offline.py).

Read in the sources of wandb 0.31, comet_ml 3.58, neptune 1.14, clearml 2.1, mlflow 3.17 and
trackio 0.43. tensorboard and aim store on this machine; a remote aim repository is replaced by
the local one.
"""

from __future__ import annotations

import functools
from typing import Any
from urllib.parse import urlparse

from trainfit.scripts.sandbox.network.post_import import Patch, with_arguments
from trainfit.scripts.sandbox.state import note

_LOCAL = ("", "file", "sqlite")


def _wandb(module: Any) -> None:
    module.init = with_arguments(module.init, mode="disabled")


def _comet(module: Any) -> None:
    for name in ("Experiment", "ExistingExperiment", "APIExperiment"):
        kind = getattr(module, name, None)
        if kind is not None and name != "APIExperiment":
            kind.__init__ = with_arguments(kind.__init__, disabled=True)
    if hasattr(module, "start"):
        module.start = with_arguments(module.start, online=False)


def _neptune(module: Any) -> None:
    for name in ("init_run", "init_model", "init_project", "init_model_version"):
        if hasattr(module, name):
            setattr(module, name, with_arguments(getattr(module, name), mode="debug"))
    if hasattr(module, "Run"):
        module.Run.__init__ = with_arguments(module.Run.__init__, mode="debug")


def _clearml(module: Any) -> None:
    module.Task.set_offline(offline_mode=True)
    module.Task.set_offline = staticmethod(lambda *args, **more: None)


def _mlflow(module: Any) -> None:
    for name in ("set_tracking_uri", "set_registry_uri"):
        if hasattr(module, name):
            setattr(module, name, _only_local(getattr(module, name)))


def _only_local(function: Any) -> Any:
    @functools.wraps(function)
    def called(uri: Any, *args: Any, **more: Any) -> Any:
        if urlparse(str(uri)).scheme in _LOCAL:
            return function(uri, *args, **more)
        note(f"mlflow logs to this machine, not to {uri}")
        return None

    return called


def _trackio(module: Any) -> None:
    nowhere = {"space_id": None, "server_url": None, "dataset_id": None, "bucket_id": None}
    original = module.init

    @functools.wraps(original)
    def init(*args: Any, **more: Any) -> Any:
        return original(*args, **{k: nowhere.get(k, v) for k, v in more.items()})

    module.init = init


def _aim(module: Any) -> None:
    original = module.Run.__init__

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **more: Any) -> None:
        if str(more.get("repo", "")).startswith("aim://"):
            more["repo"] = None
        original(self, *args, **more)

    module.Run.__init__ = __init__


PATCHES: dict[str, Patch] = {
    "wandb": _wandb,
    "comet_ml": _comet,
    "neptune": _neptune,
    "clearml": _clearml,
    "mlflow": _mlflow,
    "trackio": _trackio,
    "aim": _aim,
}
