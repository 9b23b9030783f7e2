"""Nothing leaves the machine: trackers are off, uploads are skipped, their hosts are refused."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers_cases import some_of
from helpers_sandbox import Ran, run_protected
from trainfit.results.runs.script import SandboxRequest


def run(code: str, tmp_path: Path, **more: str) -> Ran:
    request = SandboxRequest(allow_writes=True)  # as without: this does not depend on files
    ran = run_protected(code, tmp_path, tmp_path / "scratch", request, **more)
    assert ran.code == 0, ran.output
    return ran


def library(folder: Path, name: str, text: str) -> None:
    """A library in the place of the real one, with the real one's signatures."""
    (folder / name).mkdir()
    (folder / name / "__init__.py").write_text(text)


def test_variables_switch_trackers_off(tmp_path: Path) -> None:
    code = """
    import os
    assert os.environ["WANDB_MODE"] == "disabled" and os.environ["NEPTUNE_MODE"] == "debug"
    assert os.environ["CLEARML_OFFLINE_MODE"] == "1"
    assert "MLFLOW_TRACKING_URI" not in os.environ and "TRACKIO_SPACE_ID" not in os.environ
    assert os.environ["MLFLOW_REGISTRY_URI"] == "sqlite:///here.db"
    """
    run(
        code,
        tmp_path,
        WANDB_MODE="online",
        MLFLOW_TRACKING_URI="https://tracking.example.org",
        MLFLOW_REGISTRY_URI="sqlite:///here.db",
        TRACKIO_SPACE_ID="me/space",
    )


#: By the sources of the libraries: a keyword argument overrules the variable.
LIBRARIES = {
    "wandb": (
        "def init(project=None, mode=None):\n    return mode\n",
        "import wandb; assert wandb.init(project='p', mode='online') == 'disabled'",
    ),
    "comet_ml": (
        "class Experiment:\n"
        "    def __init__(self, api_key=None, disabled=False):\n        self.off = disabled\n"
        "def start(online=None):\n    return online\n",
        "import comet_ml; assert comet_ml.Experiment('key', disabled=False).off; "
        "assert comet_ml.start(online=True) is False",
    ),
    "neptune": (
        "def init_run(mode=None):\n    return mode\n",
        "import neptune; assert neptune.init_run(mode='sync') == 'debug'",
    ),
    "clearml": (
        "class Task:\n    offline = False\n    @classmethod\n"
        "    def set_offline(cls, offline_mode=False):\n        cls.offline = offline_mode\n",
        "from clearml import Task; Task.set_offline(False); assert Task.offline",
    ),
    "mlflow": (
        "used = []\ndef set_tracking_uri(uri):\n    used.append(uri)\n",
        "import mlflow; mlflow.set_tracking_uri('http://far.example'); "
        "mlflow.set_tracking_uri('file:here'); assert mlflow.used == ['file:here']",
    ),
    "trackio": (
        "def init(project, space_id=None):\n    return space_id\n",
        "import trackio; assert trackio.init('p', space_id='me/space') is None",
    ),
    "aim": (
        "class Run:\n    def __init__(self, repo=None):\n        self.repo = repo\n",
        "from aim import Run; assert Run(repo='aim://far:53800').repo is None; "
        "assert Run(repo='here').repo == 'here'",
    ),
}


@pytest.mark.parametrize("name", some_of(LIBRARIES, 3))
def test_arguments_do_not_switch_them_on(name: str, tmp_path: Path) -> None:
    text, code = LIBRARIES[name]
    library(tmp_path, name, text)
    run(f"import sys; sys.path.insert(0, {str(tmp_path)!r}); {code}", tmp_path)


def test_uploads_to_the_hub_are_skipped_and_nothing_waits_for_one_without_address(
    tmp_path: Path,
) -> None:
    pytest.importorskip("huggingface_hub")
    code = """
    import time
    from huggingface_hub import HfApi, create_repo, hf_hub_download, upload_file
    from huggingface_hub.errors import LocalEntryNotFoundError
    assert create_repo("me/model").repo_id == "me/model"
    api = HfApi()
    done = api.upload_folder(repo_id="me/model", folder_path=".", run_as_future=True)
    assert done.result().oid == "0" * 40
    upload_file(path_or_fileobj=b"x", path_in_repo="x", repo_id="me/model")
    api.delete_repo("me/model")
    time.sleep = None  # what waits for another try
    try:
        hf_hub_download("gated/model", "config.json")
    except LocalEntryNotFoundError:
        pass
    """
    ran = run(code, tmp_path, HF_ENDPOINT="http://hub.invalid")
    assert ran.protection is not None
    assert set(ran.protection.notes) == {
        f"{name} on the Hugging Face Hub was skipped"
        for name in ("create_repo", "upload_folder", "upload_file", "delete_repo")
    }


def test_a_tracker_is_not_connected_to(tmp_path: Path) -> None:
    code = """
    import socket
    for host in ("api.wandb.ai", "tracking.example.org"):
        for ask in (socket.getaddrinfo, lambda h, p: socket.create_connection((h, p), 5)):
            try:
                ask(host, 443)
            except ConnectionRefusedError as error:
                assert host in str(error)
            else:
                raise AssertionError(host)
    server = socket.create_server(("127.0.0.1", 0))
    socket.create_connection(server.getsockname()).close()
    socket.getaddrinfo("localhost", 80)
    """
    ran = run(code, tmp_path, MLFLOW_TRACKING_URI="https://tracking.example.org")
    assert ran.protection is not None
    assert "a connection to api.wandb.ai was refused" in ran.protection.notes


def test_this_process_is_as_it_was() -> None:
    """Only runs are switched off, not who imports the sandbox."""
    import trainfit.scripts.sandbox  # noqa: F401

    assert not any(type(each).__name__ == "ImportHook" for each in sys.meta_path)
