"""Text fits the screen: 80 columns for a pipe, the terminal's where there is one."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from helpers_page import FILES, RESULTS
from trainfit.cli.main import main
from trainfit.results.text import columns, laid_out_for, wrapped

RECORDING = str(RESULTS / "recording-v1.trainfit")
#: Commands to copy are never broken into lines, and a path cannot be.
WHOLE = re.compile(
    r"^ *(fix|undo|to try|write:|try the fix:|next:|tried:|.*next: trainfit|trainfit) "
    r"|^ *(Recording: )?\S+$"
)
COMMANDS = (
    *(("show", str(RESULTS / name)) for name in FILES),
    *(("show", str(RESULTS / name), "--explain") for name in ("plan-v1.json", "watch-v1.json")),
    ("gpus",),
    ("gpus", "T4", "--explain"),
    ("memory", RECORDING),
)


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: " ".join(words)[-40:])
def test_text_for_a_pipe_fits_80_columns(
    words: Sequence[str], capsys: pytest.CaptureFixture[str]
) -> None:
    main(words)
    text = capsys.readouterr().out
    long = [each for each in text.splitlines() if len(each) > 80 and not WHOLE.match(each)]
    assert text and not long


def test_text_is_laid_out_for_the_width_that_is_set_and_then_as_before() -> None:
    text = "word " * 60
    with laid_out_for(70):
        assert max(map(len, wrapped(text, "", "").splitlines())) <= 70
        with laid_out_for(500):  # longer lines are hard to read
            assert columns() == 120
        with laid_out_for(10):
            assert columns() == 60
        assert columns() == 70
    assert columns() == 100
