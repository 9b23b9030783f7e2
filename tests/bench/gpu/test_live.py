"""bench/gpu/live.py: its table, its schedule, and how what comes back is judged."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest

from helpers_cli import ROOT

pytestmark = pytest.mark.usefixtures("bench_scripts")

TABLE = """
[case.fine]
section = 1
script = "any.py"
command = "echo Nothing to fix; echo {} > {out}"

[case.slow]
section = 1
script = "any.py"
command = "sleep 60"
first = ["never"]

[case.late]
section = 4
script = "any.py"
command = "echo said: {script}"
screen = ["said: train.py"]

[case.last]
section = 1
script = "any.py"
command = "true"
first = ["never"]
"""


def live() -> ModuleType:
    spec = importlib.util.spec_from_file_location("live", ROOT / "bench" / "gpu" / "live.py")
    assert spec is not None and spec.loader is not None
    module = sys.modules["live"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_each_case_names_lines_that_its_script_has() -> None:
    module = live()
    cases = module.load(module.SCRIPTS)
    assert len(cases) >= 40 and sum(module.is_healthy(each) for each in cases) >= 6
    for case in cases:
        text = (module.SCRIPTS / case.file).read_text()
        compile(text, case.file, "exec")
        for pattern in (each for each in case.screen if "train.py:" in each):
            lines = range(1, len(text.splitlines()) + 1)
            assert any(re.search(pattern, f"train.py:{line}") for line in lines), case.name


@pytest.mark.slow  # it times this machine: cases have to start within their second
def test_it_ends_in_time_and_judges_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module, scripts, out = live(), tmp_path / "scripts", tmp_path / "out"
    scripts.mkdir()
    (scripts / "cases.toml").write_text(TABLE)
    (scripts / "any.py").write_text("pass\n")
    monkeypatch.setattr(module, "SCRIPTS", scripts)
    monkeypatch.setattr(module, "LEAST_S", 0.2)
    began = time.monotonic()
    status = module.main(["--out", str(out), "--seconds", "2", "--json"])
    assert time.monotonic() - began < 6 and status == 1
    document = json.loads(capsys.readouterr().out)["details"]
    rows = {row["name"]: row for row in document["cases"]}
    assert rows["fine"]["healthy"] and rows["fine"]["wrong"] == rows["late"]["wrong"] == []
    assert rows["slow"]["wrong"] == ["it was stopped"] and document["not_run"] == ["last"]
    # Later ones begin when they may.
    assert rows["late"]["began_s"] >= 0.4 * 2


def test_a_healthy_run_with_a_finding_is_a_false_alarm(tmp_path: Path) -> None:
    module = live()
    (case,) = [each for each in module.load(module.SCRIPTS) if each.name == "gan"]
    (tmp_path / "gan.run.json").write_text(
        json.dumps({"status": 0, "in_time": True, "began_s": 0.0, "seconds": 1.0})
    )
    (tmp_path / "gan.out").write_text("step 1\ntrainfit: recorded\nSteps are repeated\n")
    found = {"findings": [{"kind": "step_repeated", "severity": "warning"}]}
    (tmp_path / "gan.json").write_text(json.dumps(found))
    row = module.judged(case, tmp_path)
    assert row is not None and row["first"].startswith("Steps are repeated")
    assert row["wrong"] == ["finding step_repeated (warning)"]
    found["findings"][0]["severity"] = "info"
    (tmp_path / "gan.json").write_text(json.dumps(found))
    assert module.judged(case, tmp_path)["wrong"] == []
