"""Remedies that an option of the script switches on, and those that its job has no use for."""

from __future__ import annotations

import functools
import json
from typing import Any

import pytest

from helpers_cli import SCRIPTS, trainfit
from trainfit.plan.changes.by_options import switched_on, with_switches
from trainfit.plan.command.parsing import parse_command
from trainfit.results.runs.script import ScriptOption

pytestmark = pytest.mark.usefixtures("warm", "brief")

SCRIPT = SCRIPTS / "sequences.py"
_NAMES = "lora,qlora,paged-optimizer,shorter-sequences,sgd,momentum"


@functools.cache
def remedies(*words: str) -> dict[str, Any]:
    said = trainfit(
        *("plan", "--gpu", "custom:2GiB", f"--remedies={_NAMES}", "--json"),
        *("--", "python", SCRIPT, *words),
        cwd=SCRIPTS,
    )
    assert said.stdout, said.stderr
    return {each["name"]: each for each in json.loads(said.stdout)["remedies"]["items"]}


@pytest.mark.slow
def test_options_of_the_script_are_tried_and_said_in_the_command() -> None:
    found = remedies("--max-length=512", "--width=512")
    assert "--use-peft" in found["lora"]["launch"]
    assert found["lora"]["saved_bytes"] > 0 and found["lora"]["changes"] == "training"
    assert found["qlora"]["status"] == "not applicable"
    assert "--optim=paged_adamw_8bit" in found["paged-optimizer"]["launch"]
    assert "--max-length=256" in found["shorter-sequences"]["launch"]
    assert found["shorter-sequences"]["found"] == "256 instead of 512"
    assert found["sgd"]["status"] == "simulated"


@pytest.mark.slow
def test_no_other_optimizer_where_its_states_are_few() -> None:
    found = remedies("--max-length=2048", "--use-peft", "--attention=eager")
    for name in ("sgd", "momentum", "paged-optimizer"):
        assert found[name]["status"] == "not applicable"
        assert "states are only" in found[name]["reason"]
    assert found["lora"]["status"] == "not applicable"


def test_four_bits_bring_their_adapters_along() -> None:
    options = [
        ScriptOption(("--use_peft",), "use_peft", "False", False, switch=True, default="False"),
        ScriptOption(("--load_in_4bit",), "load_in_4bit", "False", False, switch=True,
                     default="False"),
        ScriptOption(("--optim",), "optim", "sgd", False),
    ]  # fmt: skip
    plain = parse_command(["python", str(SCRIPT), "--width=8"])
    command = with_switches(plain, options)
    assert command.line() == plain.line() and "paged-optimizer" not in command.present
    values = switched_on(command, "qlora")
    assert values is not None
    assert command.line(**values).endswith("--width=8 --use_peft --load_in_4bit")
    assert switched_on(command, "paged-optimizer") is None


def test_a_larger_gpu_is_of_the_class_that_was_named() -> None:
    said = trainfit(
        *("plan", "--gpu", "GTX 960 2GB", "--no-remedies", "--json"),
        *("--", "python", SCRIPT, "--max-length=2048", "--attention=eager", "--batch-size=16"),
        cwd=SCRIPTS,
    )
    result = json.loads(said.stdout)
    assert not result["now"]["fits"]
    assert result["other_gpus"] and all(key[:3] in ("RTX", "GTX") for key in result["other_gpus"])
