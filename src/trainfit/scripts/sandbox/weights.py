"""Pretrained weights that this machine cannot download: the model keeps those it was made with.

Their values change neither memory nor time; a script that ends at the download tells nothing.
"""

from __future__ import annotations

import functools
import os
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlparse

from trainfit.scripts.sandbox.layer import note
from trainfit.simgpu.patching import PatchSet

#: What is replaced for the rest of the process's life.
_patches: Final = PatchSet()


class AbsentWeights(OrderedDict[str, Any]):
    """The state of a model that could not be downloaded: empty, and so is each part of it
    (``checkpoint["model"]``); what is taken out of it is not there."""

    def __missing__(self, key: str) -> AbsentWeights:
        return self

    def __delitem__(self, key: str) -> None:
        """Nothing."""

    def pop(self, key: str, default: Any = None) -> Any:
        """``default``: scripts drop the head's weights so."""
        return default


def _load(download: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(download)
    def loaded(url: str, *args: Any, **more: Any) -> Any:
        try:
            return download(url, *args, **more)
        except HTTPError:
            raise  # the server answered: there is no such file for the user either
        except URLError:
            name = os.path.basename(urlparse(url).path)
            note(
                f"{name} could not be downloaded here: the model keeps the weights that it was "
                "made with, which changes neither memory nor time"
            )
            return AbsentWeights()

    return loaded


def _keep(load: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: Any, *args: Any, **more: Any) -> Any:
        if isinstance(state_dict, AbsentWeights):
            state_dict = self.state_dict()
        return load(self, state_dict, *args, **more)

    return load_state_dict


def _names(look_up: Callable[..., Any]) -> Callable[..., Any]:
    """``torch.hub.list``: scripts add what it gives to the models that an option may name."""

    @functools.wraps(look_up)
    def listed(github: str, *args: Any, **more: Any) -> Any:
        try:
            return look_up(github, *args, **more)
        except HTTPError:
            raise
        except URLError:
            note(f"the models of {github} could not be looked up here: none is taken to be there")
            return []

    return listed


def _downloads(module: Any) -> None:
    _patches.hook(module, "load_state_dict_from_url", _load)
    _patches.hook(module, "list", _names)


def _modules(module: Any) -> None:
    _patches.hook(module.Module, "load_state_dict", _keep)


#: Whoever has imported the function by its name (torchvision, timm) calls it so, too.
WEIGHT_PATCHES: Final[dict[str, Callable[[Any], None]]] = {
    "torch.hub": _downloads,
    "torch.nn.modules.module": _modules,
}
