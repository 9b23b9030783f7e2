"""Settings that are meant, and that figures need to say."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfit.lint.api import settings_in

SEEDS = "import torch\ndef seed_all():\n    {line}\nseed_all()\n"
SEARCH = """
size = 64
while size:
    failed = False
    try:
        train(size)
    except {error} as error:
        {told}failed = True
    if not failed:
        break
    {less}
"""
NOT_MEMORY = 'if "out of memory" not in str(error): raise\n        '


def _kinds(path: Path, script: str, *, deterministic: bool = True, full: bool = True) -> list[str]:
    path.write_text(script)
    found = settings_in(path, (), (), is_deterministic=deterministic, is_full=full)
    return [each.kind for each in found]


@pytest.mark.parametrize(
    ("line", "kinds"),
    [
        ("torch.backends.cudnn.deterministic = True", ["deterministic"]),
        ("torch.use_deterministic_algorithms(True, warn_only=True)", ["deterministic"]),
        ("torch.backends.cudnn.deterministic = False", []),
        ("torch.use_deterministic_algorithms(False)", []),
        ("torch.backends.cudnn.benchmark = True", []),
    ],
)
def test_lines_that_ask_for_deterministic_algorithms(
    tmp_path: Path, line: str, kinds: list[str]
) -> None:
    path = tmp_path / "train.py"
    assert _kinds(path, SEEDS.format(line=line)) == kinds
    assert not _kinds(path, SEEDS.format(line=line), deterministic=False)  # never reached


@pytest.mark.parametrize(
    ("error", "told", "less", "kinds"),
    [
        ("torch.OutOfMemoryError", "", "size //= 2", ["tries-less"]),
        ("RuntimeError", NOT_MEMORY, "size = size // 2", ["tries-less"]),
        ("torch.cuda.OutOfMemoryError", "", "size = max(1, int(size * 0.5))", ["tries-less"]),
        ("torch.OutOfMemoryError", "", "size -= 0", []),
        ("ValueError", "", "size //= 2", []),
        ("RuntimeError", "", "size //= 2", []),
    ],
)
def test_a_search_of_the_scripts_own(
    tmp_path: Path, error: str, told: str, less: str, kinds: list[str]
) -> None:
    path = tmp_path / "train.py"
    script = SEARCH.format(error=error, told=told, less=less)
    assert _kinds(path, script) == kinds
    assert not _kinds(path, script, full=False)


def test_a_script_that_cannot_be_read(tmp_path: Path) -> None:
    assert not _kinds(tmp_path / "train.py", "def broken(:\n")
