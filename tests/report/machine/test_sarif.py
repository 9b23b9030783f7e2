"""What `doctor --script` found as SARIF 2.1.0.

The part of OASIS' schema that is used stands here, stricter: no key that it does not name. Its
documents were checked with the whole schema (oasis-tcs/sarif-spec, sarif-2.1/schema) when this was
written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from helpers_cli import trainfit
from helpers_machines import MACHINES
from trainfit.report.writers.sarif import sarif_text
from trainfit.results.doctor import ScriptReport
from trainfit.results.findings import Finding, Fix, Place


def record(required: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object that has no other keys."""
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


TEXT: dict[str, Any] = record("text", text={"type": "string", "minLength": 1})
COUNT = {"type": "integer", "minimum": 1}
REGION = record(
    "startLine", startLine=COUNT, startColumn=COUNT, snippet=record("text", text={"type": "string"})
)
LOCATION = record(
    "physicalLocation",
    physicalLocation=record(
        "artifactLocation",
        artifactLocation=record("uri", uri={"type": "string", "format": "uri-reference"}),
        region=REGION,
    ),
)
LEVEL = {"enum": ["none", "note", "warning", "error"]}
RESULT = record(
    "message ruleId",
    ruleId={"type": "string"},
    ruleIndex={"type": "integer", "minimum": 0},
    level=LEVEL,
    message=TEXT,
    locations={"type": "array", "items": LOCATION, "minItems": 1},
)
DRIVER = record(
    "name",
    name={"const": "trainfit"},
    semanticVersion={"type": "string"},
    rules={
        "type": "array",
        "uniqueItems": True,
        "items": record("id", id={"type": "string"}, shortDescription=TEXT),
    },
)
INVOCATION = record(
    "executionSuccessful",
    executionSuccessful={"type": "boolean"},
    toolExecutionNotifications={
        "type": "array",
        "items": record("message", level=LEVEL, message=TEXT),
    },
)
RUN = record(
    "tool results",
    tool=record("driver", driver=DRIVER),
    columnKind={"const": "unicodeCodePoints"},
    invocations={"type": "array", "items": INVOCATION},
    results={"type": "array", "items": RESULT},
)
LOG = record(
    "version runs",
    **{"$schema": {"type": "string"}},
    version={"const": "2.1.0"},
    runs={"type": "array", "items": RUN, "minItems": 1},
)


def checked(text: str) -> dict[str, Any]:
    """The document's run, which is as the schema has it."""
    document = json.loads(text)
    jsonschema.validate(document, LOG)
    run: dict[str, Any] = document["runs"][0]
    names = [rule["id"] for rule in run["tool"]["driver"]["rules"]]
    assert names == sorted(set(names))
    for result in run["results"]:
        assert names[result["ruleIndex"]] == result["ruleId"]
    return run


def test_findings_have_their_places(tmp_path: Path) -> None:
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "net work.py").write_text(
        "import torch\n\nnet = torch.nn.DataParallel(torch.nn.Linear(2, 2))\n"
    )
    (tmp_path / "plain.py").write_text("print('no PyTorch in it')\n")
    words = ["doctor", "--format", "sarif", "--script", "own/net work.py", "plain.py"]
    done = trainfit(*words, cwd=tmp_path)
    assert done.returncode == 1 and not done.stderr
    (result,) = checked(done.stdout)["results"]
    assert result["ruleId"] == "data-parallel" and result["level"] == "warning"
    (location,) = result["locations"]
    place = location["physicalLocation"]
    assert place["artifactLocation"] == {"uri": "own/net%20work.py"}
    assert (place["region"]["startLine"], place["region"]["startColumn"]) == (3, 7)
    assert place["region"]["snippet"]["text"].startswith("net = torch.nn.DataParallel")
    assert "Write: torch.nn.parallel.DistributedDataParallel" in result["message"]["text"]


def test_nothing_found_is_a_document_too(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("print(1)\n")
    done = trainfit("doctor", "--format", "sarif", "--script", "plain.py", cwd=tmp_path)
    assert done.returncode == 0
    run = checked(done.stdout)
    assert run["results"] == [] and run["tool"]["driver"]["rules"] == []


def test_files_elsewhere_and_files_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = [
        Finding(
            rule,
            "warning",
            "",
            (),
            "why",
            (Fix("what"),),
            place=Place(file, 1, 1),
        )
        for rule, file in (("b", "/else where/x.py"), ("a", f"{tmp_path}/in/y.py"), ("b", "z.py"))
    ]
    run = checked(sarif_text(ScriptReport("z.py", (), tuple(found), ("w.py: too large",))))
    places = [result["locations"][0]["physicalLocation"] for result in run["results"]]
    uris = [place["artifactLocation"]["uri"] for place in places]
    assert uris == ["file:///else%20where/x.py", "in/y.py", "z.py"]
    (told,) = run["invocations"][0]["toolExecutionNotifications"]
    assert told["message"]["text"] == "not read: w.py: too large"


@pytest.mark.slow
def test_a_stored_diagnosis_is_shown_as_such(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text(
        "import torch\nm = torch.nn.DataParallel(torch.nn.Linear(2, 2))\n"
    )
    words = ["doctor", "--only", "files", "--script", "x.py", "--output", "d.json"]
    machine = MACHINES / "workstation.json"
    assert trainfit(*words, "--machine", machine, cwd=tmp_path).returncode == 1
    shown = trainfit("show", "d.json", "--format", "sarif", cwd=tmp_path)
    direct = trainfit("doctor", "--format", "sarif", "--script", "x.py", cwd=tmp_path)
    assert checked(shown.stdout) == checked(direct.stdout)
