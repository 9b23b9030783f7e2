"""Pretrained weights that cannot be downloaded: the run goes on and says so."""

from __future__ import annotations

from pathlib import Path
from urllib.error import HTTPError, URLError

import pytest

from helpers_cli import json_of, trainfit
from trainfit.scripts.sandbox.network import AbsentWeights, _load, _load_into, _names

SCRIPT = """
import torch
from torch.hub import load_state_dict_from_url
model = torch.nn.Linear(256, 256)
state = load_state_dict_from_url("https://nowhere.invalid/weights/big.pth")["model"]
state.pop("bias")
before = model.weight.clone()
model.load_state_dict(state)
assert torch.equal(before, model.weight)
model.cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(3):
    loss = model(torch.randn(8, 256, device="cuda")).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
"""


@pytest.mark.usefixtures("warm")
def test_a_script_goes_on_without_its_pretrained_weights(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("simulate", "--gpu", "RTX 4060", "--json", "--", "python", "train.py")
    done = trainfit(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "big.pth could not be downloaded here: the model keeps the weights" in str(json_of(done))


def test_an_empty_state_of_whatever_form() -> None:
    state = AbsentWeights()
    assert state["model"]["encoder"] is state and state.pop("head.weight") is None
    del state["head.bias"]
    assert not state and dict(state.items()) == {}


def test_a_file_that_the_server_does_not_have_fails_as_it_would() -> None:
    def missing(url: str) -> None:
        raise HTTPError(url, 404, "Not Found", None, None)  # type: ignore[arg-type]

    def offline(url: str) -> None:
        raise URLError("no such host")

    with pytest.raises(HTTPError):
        _load(missing)("https://nowhere.invalid/a.pth")
    assert isinstance(_load(offline)("https://nowhere.invalid/a.pth"), AbsentWeights)
    with pytest.raises(HTTPError):
        _names(missing)("nobody/nothing:main")
    assert _names(offline)("nobody/nothing:main") == []


class LocalEntryNotFoundError(FileNotFoundError):
    """As of huggingface_hub."""


def test_timms_weights_that_the_hub_cannot_give() -> None:
    def offline(model: object, strict: bool) -> None:
        raise LocalEntryNotFoundError("cannot find the requested files in the local cache")

    def other(model: object) -> None:
        raise FileNotFoundError("weights.pth")

    assert _load_into(offline)(object(), strict=True) is None
    with pytest.raises(FileNotFoundError, match=r"weights.pth"):
        _load_into(other)(object())
