"""``trainfit completion``: what the shells themselves make of it."""

from __future__ import annotations

import os
import pty
import select
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from helpers_cli import trainfit
from trainfit.cli.parser import VERBS
from trainfit.cli.results_options import SHELLS
from trainfit.cli.verbs.completion import gpu_names, whole_parser
from trainfit.hardware import find_gpu

#: As a user would press the key behind these words: prints what there is to choose from.
_BASH = """
source {file}
COMP_WORDS=(trainfit {words}); COMP_CWORD=$(( ${{#COMP_WORDS[@]}} - 1 ))
$(complete -p trainfit | sed 's/.*-F \\([^ ]*\\).*/\\1/') trainfit
printf '%s\\n' "${{COMPREPLY[@]}}"
"""
_FISH = "source {file}; complete -C 'trainfit {words}'"
_TYPED = {
    "pl": "plan",
    "plan --step-t": "--step-time",
    "plan --gpu a100-8": "a100-80gb-sxm",
    "gpus rtx-409": "rtx-4090",
    "show res": "result.json",
    "completion z": "zsh",
    "plan -- python tr": "train.py",
}


@pytest.mark.parametrize("typed", _TYPED)
@pytest.mark.parametrize(("shell", "code"), [("bash", _BASH), ("fish", _FISH)])
def test_what_a_shell_offers(shell: str, code: str, typed: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    (tmp_path / "result.json").touch()
    (tmp_path / "train.py").touch()
    file = tmp_path / "completion"
    file.write_text(trainfit("completion", shell, cwd=tmp_path).stdout)
    done = subprocess.run(
        [shell, "-c", code.format(file=file, words=typed)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=300,
    )
    found = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert _TYPED[typed] in found, done.stdout + done.stderr


def test_zsh_reads_it(tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("no zsh here")
    file = tmp_path / "completion"
    file.write_text(trainfit("completion", "zsh", cwd=tmp_path).stdout)
    code = (
        f'autoload -U compinit; compinit -u -D; eval "$(cat {file})"; print ${{_comps[trainfit]}}'
    )
    done = subprocess.run(["zsh", "-fc", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "_shtab_trainfit", done.stderr


@pytest.mark.parametrize(
    "typed", ["pl", "plan --step-t", "gpus rtx-409", "show res", "plan -- python tr"]
)
def test_what_zsh_completes(typed: str, tmp_path: Path) -> None:
    """Its completion works within its line editor alone: the key is pressed in a terminal."""
    if shutil.which("zsh") is None:
        pytest.skip("no zsh here")
    (tmp_path / "result.json").touch()
    (tmp_path / "train.py").touch()
    (tmp_path / "completion").write_text(trainfit("completion", "zsh", cwd=tmp_path).stdout)
    ours, its = pty.openpty()
    shell = subprocess.Popen(
        ["zsh", "-f", "-i"], stdin=its, stdout=its, stderr=its, cwd=tmp_path,
        env={**os.environ, "TERM": "dumb"}, start_new_session=True,
    )  # fmt: skip
    os.close(its)
    try:
        setup = 'autoload -U compinit; compinit -u -D; eval "$(cat completion)"; print RE""ADY'
        os.write(ours, f"stty cols 200; {setup}\n".encode())
        _read_until(ours, "\nREADY")
        os.write(ours, f"trainfit {typed}\t".encode())
        *words, _ = ["", *typed.split()]
        _read_until(ours, " ".join(["trainfit", *words[1:], f"{_TYPED[typed]} "]))
    finally:
        shell.kill()
        shell.wait()
        os.close(ours)


def _read_until(terminal: int, wanted: str) -> None:
    """Fails after five minutes without it."""
    text, end = "", time.monotonic() + 300
    while wanted not in text:
        assert select.select([terminal], [], [], max(0.0, end - time.monotonic()))[0], text
        text += os.read(terminal, 65536).decode(errors="replace").replace("\r", "")


@pytest.mark.parametrize("shell", SHELLS)
def test_every_verb_and_option_is_in_it(shell: str, tmp_path: Path) -> None:
    text = trainfit("completion", shell, cwd=tmp_path).stdout
    assert all(verb in text for verb in VERBS)
    subparsers = next(each for each in whole_parser()._actions if each.dest == "==SUPPRESS==")
    for parser in subparsers.choices.values():  # type: ignore[union-attr]
        for name in parser._option_string_actions:
            assert name.lstrip("-") in text, name


def test_every_name_of_a_gpu_is_one() -> None:
    assert len(gpu_names()) > 20
    for name in gpu_names():
        assert find_gpu(name).key.lower().replace(" ", "-") == name
