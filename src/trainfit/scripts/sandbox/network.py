"""Nothing of a user's leaves the machine: trackers are switched off, uploads are skipped."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import os
import re
import socket
from collections import OrderedDict
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Final
from urllib.error import HTTPError, URLError
from urllib.parse import urlparse
from urllib.request import getproxies

from trainfit.scripts.sandbox.layer import note
from trainfit.simgpu.patching import ImportHook, PatchSet

# ---
# Pretrained weights that this machine cannot download: the model keeps those it was made with.
#
# Their values change neither memory nor time; a script that ends at the download tells nothing.


#: What is replaced for the rest of the process's life.


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
            _note_absent(os.path.basename(urlparse(url).path))
            return AbsentWeights()

    return loaded


def _note_absent(what: str) -> None:
    note(
        f"{what} could not be downloaded here: the model keeps the weights that it was "
        "made with, which changes neither memory nor time"
    )


#: What huggingface_hub raises where its server is not reached and its cache lacks the file.
_NOT_REACHED: Final = {"LocalEntryNotFoundError", "OfflineModeIsEnabled"}


def _load_into(load: Callable[..., Any]) -> Callable[..., Any]:
    """timm's ``load_pretrained``, which gets the model's weights from the hub and loads them."""

    @functools.wraps(load)
    def load_pretrained(model: Any, *args: Any, **more: Any) -> Any:
        try:
            return load(model, *args, **more)
        except Exception as error:
            if _NOT_REACHED.isdisjoint(each.__name__ for each in type(error).__mro__):
                raise
            known = getattr(model, "pretrained_cfg", None) or {}
            _note_absent(f"weights of {known.get('architecture') or type(model).__name__}")
            return None

    return load_pretrained


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


def _builder(module: Any) -> None:
    _patches.hook(module, "load_pretrained", _load_into)


def _modules(module: Any) -> None:
    _patches.hook(module.Module, "load_state_dict", _keep)


#: Whoever has imported the function by its name (torchvision, timm) calls it so, too.
WEIGHT_PATCHES: Final[dict[str, Callable[[Any], None]]] = {
    "torch.hub": _downloads,
    "torch.nn.modules.module": _modules,
    "timm.models._builder": _builder,
}


# ---
# Changes a library right after the user's script has imported it.


Patch = Callable[[Any], None]


def after_import(patches: Mapping[str, Patch]) -> None:
    """Call ``patches[name]`` with the module of that name once it is imported, or now.

    A library that is not as expected stays as it is.
    """
    for name, patch in patches.items():
        ImportHook(name, _careful(patch)).install()


def _careful(patch: Patch) -> Callable[[ModuleType], None]:
    def careful(module: ModuleType) -> None:
        with contextlib.suppress(Exception):
            patch(module)

    return careful


def with_arguments(function: Callable[..., Any], **forced: Any) -> Callable[..., Any]:
    """The function, called with these keyword arguments whatever the caller says."""

    def called(*args: Any, **more: Any) -> Any:
        return function(*args, **{**more, **forced})

    return functools.update_wrapper(called, function)


# ---
# Uploads to a model hub are skipped, each with a note; the script goes on.
#
# ``HfApi`` of huggingface_hub is what ``push_to_hub`` of all libraries comes to. Its methods that
# change something on the hub do nothing here, and give what a successful call would.


#: What a method that changes the hub begins with.
_CHANGES = re.compile(
    r"(create|upload|delete|move|update|duplicate|add|super_squash|preupload|merge|change"
    r"|comment|request|restart|pause|resume|set|edit|rename|hide|unlike|run|cancel)_|unlike$|like$"
)
_COMMITS = ("create_commit", "upload_file", "upload_folder", "delete_file", "delete_folder")
#: Nobody's: no such commit exists.
_COMMIT = "0" * 40


def _hf_api(module: Any) -> None:
    api = module.HfApi
    for name, method in list(vars(api).items()):
        if not callable(method) or not _CHANGES.match(name):
            continue
        setattr(api, name, _skipped(module, name, method))
        if hasattr(module, name):  # the function of the same name calls an instance's method
            setattr(module, name, getattr(module.api, name))


def _skipped(module: Any, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def skipped(self: Any, *args: Any, **more: Any) -> Any:
        repo = str(more.get("repo_id") or (args[0] if args and isinstance(args[0], str) else ""))
        note(f"{name} on the Hugging Face Hub was skipped")
        result = _result(module, self, name, repo, str(more.get("commit_message", "")))
        if not more.get("run_as_future"):
            return result
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_result(result)
        return future

    return skipped


def _result(module: Any, api: Any, name: str, repo: str, message: str) -> Any:
    repo = repo if "/" in repo else f"user/{repo or 'repo'}"
    url = f"{api.endpoint}/{repo}"
    if name == "create_repo":
        return module.RepoUrl(url, endpoint=api.endpoint)
    if name in _COMMITS:
        return module.CommitInfo(
            commit_url=f"{url}/commit/{_COMMIT}",
            commit_message=message,
            commit_description="",
            oid=_COMMIT,
        )
    return None


# Where this machine does not know the hub's address it is offline: five retries of each file, half
# a minute together, would change nothing.


def _hf_http(module: Any) -> None:
    for name in ("http_backoff", "http_stream_backoff"):
        if hasattr(module, name):
            _patches.hook(module, name, _once_where_offline)


def _once_where_offline(request: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(request)
    def requested(method: Any, url: str, *args: Any, **more: Any) -> Any:
        if _is_unknown(_host(url)):
            more["max_retries"] = 0
        return request(method, url, *args, **more)

    return requested


def _is_unknown(host: str | None) -> bool:
    """Has the host no address here? (A proxy would look it up itself.)"""
    if host is None or getproxies():
        return False
    try:
        socket.getaddrinfo(host, None)
    except OSError:
        return True
    return False


HUB_PATCHES: dict[str, Patch] = {
    "huggingface_hub.hf_api": _hf_api,
    "huggingface_hub.utils._http": _hf_http,
}


# ---
# Experiment trackers whose arguments override the environment (offline.py).
#
# Read in the sources of wandb 0.31, comet_ml 3.58, neptune 1.14, clearml 2.1, mlflow 3.17 and
# trackio 0.43. tensorboard and aim store on this machine; a remote aim repository is replaced by
# the local one.


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


TRACKER_PATCHES: dict[str, Patch] = {
    "wandb": _wandb,
    "comet_ml": _comet,
    "neptune": _neptune,
    "clearml": _clearml,
    "mlflow": _mlflow,
    "trackio": _trackio,
    "aim": _aim,
}


# ---
# Disables reporting to external services; downloads and local services keep working.


#: What the libraries read; each library's own documentation and source.
VARIABLES = {
    "WANDB_MODE": "disabled",
    "WANDB_SILENT": "true",
    "COMET_AUTO_LOG_DISABLE": "1",
    "COMET_START_ONLINE": "0",
    "NEPTUNE_MODE": "debug",
    "CLEARML_OFFLINE_MODE": "1",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "WANDB_ERROR_REPORTING": "false",
}
#: They name a server, where the library else stores on this machine.
_SERVERS = (
    *("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", "TRACKIO_SPACE_ID", "TRACKIO_SERVER_URL"),
    *("TRACKIO_BUCKET_ID", "TRACKIO_REGISTRY_BUCKET_ID"),
)
#: Their values are servers too, that nobody connects to.
_ADDRESSES = ("WANDB_BASE_URL", "CLEARML_API_HOST", "COMET_URL_OVERRIDE", "NEPTUNE_CUSTOM_BACKEND")
_HOSTS = (
    *("wandb.ai", "comet.com", "comet.ml", "neptune.ai", "clear.ml", "aimstack.io"),
    *("google-analytics.com", "sentry.io", "posthog.com", "segment.io", "mixpanel.com"),
)
#: What is replaced for the rest of the process's life.
_patches: Final = PatchSet()


class OfflineError(ConnectionRefusedError):
    """A connection that a run of trainfit does not make."""


def go_offline() -> None:
    """Go offline with this process and its children, before the script runs."""
    hosts = {*_HOSTS}
    for name in (*_SERVERS, *_ADDRESSES):
        if (host := _host(os.environ.get(name, ""))) is not None:
            hosts.add(host)
    for name in _SERVERS:
        if not _is_local(os.environ.get(name, "")):
            del os.environ[name]
    os.environ.update(VARIABLES)
    after_import({**TRACKER_PATCHES, **HUB_PATCHES, **WEIGHT_PATCHES})
    _refuse_hosts(tuple(hosts))


def _is_local(server: str) -> bool:
    """A file, a data base file, a server on this machine, or nothing."""
    if not server or urlparse(server).scheme in ("file", "sqlite"):
        return True
    host = _host(server)
    return host is not None and (host == "localhost" or host.startswith("127."))


def _host(address: str) -> str | None:
    try:
        return urlparse(address).hostname
    except ValueError:
        return None


def _refuse_hosts(hosts: tuple[str, ...]) -> None:
    """Whoever asks for such a host's address in Python, or connects to it, is refused."""

    def check(host: Any) -> None:
        name = host.decode(errors="replace") if isinstance(host, bytes) else str(host or "")
        name = name.lower().rstrip(".")
        if any(name == each or name.endswith(f".{each}") for each in hosts):
            note(f"a connection to {name} was refused")
            raise OfflineError(f"trainfit blocks connections to the experiment tracker {name}")

    def of_address(getaddrinfo: Callable[..., Any]) -> Callable[..., Any]:
        def checked(host: Any, *args: Any, **more: Any) -> Any:
            check(host)
            return getaddrinfo(host, *args, **more)

        return checked

    def of_connection(connect: Callable[..., Any]) -> Callable[..., Any]:
        def checked(self: socket.socket, address: Any) -> Any:
            if isinstance(address, tuple):
                check(address[0])
            return connect(self, address)

        return checked

    _patches.hook(socket, "getaddrinfo", of_address)
    _patches.hook(socket.socket, "connect", of_connection)


__all__ = ["go_offline"]
