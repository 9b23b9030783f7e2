"""Uploads to a model hub are skipped, each with a note; the script goes on.

``HfApi`` of huggingface_hub is what ``push_to_hub`` of all libraries comes to. Its methods that
change something on the hub do nothing here, and give what a successful call would.
"""

from __future__ import annotations

import concurrent.futures
import functools
import re
from collections.abc import Callable
from typing import Any

from trainfit.scripts.sandbox.network.post_import import Patch
from trainfit.scripts.sandbox.state import note

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


PATCHES: dict[str, Patch] = {"huggingface_hub.hf_api": _hf_api}
