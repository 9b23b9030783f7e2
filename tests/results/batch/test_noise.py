"""The measured noise scale as a file: what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from trainfit.results.batch import NoiseResult
from trainfit.results.files.errors import ResultFileError

FILE = Path(__file__).parents[2] / "fixtures" / "results" / "noise-scale-v1.json"


@pytest.mark.parametrize(
    "bad", [{"micro_batch": 0}, {"accumulation": -4}, {"ranks": 10**400}, {"steps_used": -1}]
)
def test_counts_that_no_run_has(bad: dict[str, int], tmp_path: Path) -> None:
    path = tmp_path / "noise.json"
    path.write_text(json.dumps(json.loads(FILE.read_text()) | bad))
    with pytest.raises(ResultFileError, match="damaged"):
        NoiseResult.load(path)


def test_the_effective_batch_has_all_ranks() -> None:
    assert dataclasses.replace(NoiseResult.load(FILE), ranks=4).batch_size == 4 * 4 * 4
