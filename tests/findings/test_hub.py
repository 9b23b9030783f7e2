"""What a hub does not give is told by its name, with the command that fetches it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfit.findings.failure import of_exception

OFFLINE = "OSError: We couldn't connect to 'https://huggingface.co' to load the files, and …"
SET = "ConnectionError: Couldn't reach 'bigcode/the-stack' on the Hub (OfflineModeIsEnabled)"
GATED = (
    "OSError: You are trying to access a gated repo.\nMake sure to have access to it at "
    "https://huggingface.co/meta-llama/Llama-3.1-8B.\n401 Client Error."
)
UNKNOWN = (
    "OSError: gpt3 is not a local folder and is not a valid model identifier listed on "
    "'https://huggingface.co/models'"
)
NO_FILE = "OSError: stabilityai/sd-vae-ft-ema does not appear to have a file named config.json."


def of_line(tmp_path: Path, code: str, said: str) -> tuple[str, str]:
    """Title and fix of a failure at the last line of a script."""
    script = tmp_path / "train.py"
    script.write_text(code)
    lines = code.splitlines()
    fault = of_exception(
        f'Traceback (most recent call last):\n  File "{script}", line {len(lines)}, in <module>\n'
        f"    {lines[-1]}\n{said}\n"
    )
    assert fault is not None
    return fault.title, fault.fix.action


@pytest.mark.parametrize(
    ("code", "name"),
    [
        ('m = AutoModel.from_pretrained("org/model-8B").cuda()', "org/model-8B"),
        ("NAME = 'org/model'\nNAME = 'org/model-8B'\nm = AutoModel.from_pretrained(NAME)",
         "org/model-8B"),
        ("t = AutoTokenizer.from_pretrained('gpt2', use_fast=True)", "gpt2"),
    ],
)  # fmt: skip
def test_a_model_that_is_not_there_is_named(tmp_path: Path, code: str, name: str) -> None:
    title, fix = of_line(tmp_path, code, OFFLINE)
    assert repr(name) in title and "cannot be reached" in title
    assert f"hf download {name} --local-dir" in fix


def test_a_name_that_nothing_tells_is_left_out(tmp_path: Path) -> None:
    title, fix = of_line(tmp_path, "m = AutoModel.from_pretrained(args.model)", OFFLINE)
    assert "data set is not on this machine" in title and "hf download NAME" in fix


@pytest.mark.parametrize(
    ("said", "name", "fix"),
    [
        (SET, "bigcode/the-stack", "hf download bigcode/the-stack --repo-type dataset"),
        (GATED, "meta-llama/Llama-3.1-8B", "hf auth login"),
        (UNKNOWN, "gpt3", "check the name"),
        (NO_FILE, "stabilityai/sd-vae-ft-ema", "hf download stabilityai/sd-vae-ft-ema"),
    ],
)
def test_a_message_with_a_name(tmp_path: Path, said: str, name: str, fix: str) -> None:
    title, action = of_line(tmp_path, "main()", said)
    assert repr(name) in title and fix in action
