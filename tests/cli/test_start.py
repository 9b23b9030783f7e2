"""What a call of ``trainfit`` imports before it knows what to do."""

from __future__ import annotations

import subprocess
import sys

from helpers_cli import environment


def test_no_verb_imports_pytorch() -> None:
    """It takes seconds, and only processes that verbs start need it. The help lists all verbs."""
    code = (
        "import atexit, sys; from trainfit.cli.main import main; "
        "atexit.register(lambda: print('torch' in sys.modules, 'trainfit.cli.verbs.plan' in "
        "sys.modules)); main(['--help'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "False True"
