"""Disables reporting to external services; downloads and local services keep working."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from typing import Any, Final
from urllib.parse import urlparse

from trainfit.scripts.sandbox.network import hub, trackers
from trainfit.scripts.sandbox.network.post_import import after_import
from trainfit.scripts.sandbox.state import note
from trainfit.simgpu.patching import PatchSet

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
    """Of this process and its children, before the script runs."""
    hosts = {*_HOSTS}
    for name in (*_SERVERS, *_ADDRESSES):
        if (host := _host(os.environ.get(name, ""))) is not None:
            hosts.add(host)
    for name in _SERVERS:
        if not _is_local(os.environ.get(name, "")):
            del os.environ[name]
    os.environ.update(VARIABLES)
    after_import({**trackers.PATCHES, **hub.PATCHES})
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
