"""docs/agents.md and docs/guide/integrations.md: what they name is what there is."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from helpers_cli import ROOT
from trainfit.results.files.contents import metric
from trainfit.results.kinds import KINDS
from trainfit.results.memory import RecordingSummary

AGENTS = (ROOT / "docs" / "agents.md").read_text("utf-8")
GUIDE = (ROOT / "docs" / "guide" / "integrations.md").read_text("utf-8")
SCHEMAS = {
    path.stem: json.loads(path.read_text()) for path in (ROOT / "docs/schema").glob("*.json")
}


def rows(page: str, first: str) -> list[list[str]]:
    """The cells of the table whose first title is ``first``."""
    lines = page.splitlines()
    at = next(number for number, line in enumerate(lines) if line.startswith(f"| {first} |"))
    found = []
    for line in lines[at + 2 :]:
        if not line.startswith("|"):
            break
        found.append([cell.strip() for cell in line.strip("|").split("|")])
    return found


KEYS = [
    (cells[0], key) for cells in rows(AGENTS, "document") for key in re.findall("`(.+?)`", cells[1])
]


def parts(schema: dict[str, Any], part: Any) -> Iterator[dict[str, Any]]:
    """What a part of a schema may be, references resolved."""
    if "$ref" in part:
        yield from parts(schema, schema["$defs"][part["$ref"].rpartition("/")[2]])
    elif "anyOf" in part:
        for each in part["anyOf"]:
            yield from parts(schema, each)
    else:
        yield part


def step(schema: dict[str, Any], here: list[dict[str, Any]], word: str) -> list[dict[str, Any]]:
    name = word.removesuffix("[]")
    below = [each["properties"][name] for each in here if name in each.get("properties", {})]
    found = [one for each in below for one in parts(schema, each)]
    if word.endswith("[]"):
        found = [one for each in found if "items" in each for one in parts(schema, each["items"])]
    return found


@pytest.mark.parametrize(("document", "key"), KEYS, ids="-".join)
def test_a_key_is_in_the_schema(document: str, key: str) -> None:
    schema = SCHEMAS[document]
    here = [schema]
    for word in key.split("."):
        here = step(schema, here, word)
        assert here, word


def test_keys_are_looked_up() -> None:
    assert len(KEYS) > 60
    schema = SCHEMAS["trainfit-plan"]
    assert not step(schema, [schema], "no_such_key")
    assert not step(schema, [schema], "launch[]")


def test_every_document_is_one_of_ours() -> None:
    named = {cells[2] for cells in rows(AGENTS, "to find out")}
    assert named <= set(SCHEMAS) and {document for document, _ in KEYS} == named


def test_commands_print_json() -> None:
    """That their options exist is a test of tests/test_docs.py, for code blocks."""
    from trainfit.cli.parser import read_words

    for _, command, _ in rows(AGENTS, "to find out"):
        import shlex

        words = shlex.split(command.strip("`"))
        assert words[0] == "trainfit" and read_words(words[1:])[1].json


def test_exit_codes_are_those_that_are_used() -> None:
    named = {int(cells[0]) for cells in rows(AGENTS, "code")}
    used: set[int] = set()
    for file in (ROOT / "src" / "trainfit").rglob("*.py"):
        text = file.read_text()
        if "cli" not in file.parts and not re.search(r"(?im)^ *(exit_)?code\b.*=", text):
            continue
        for node in ast.walk(ast.parse(text)):
            value = None
            if isinstance(node, ast.Return) and "cli" in file.parts:
                value = node.value
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                target = node.targets[0] if isinstance(node, ast.Assign) else node.target
                if getattr(target, "id", "").lower() in ("exit_code", "code"):
                    value = node.value
            if value is not None:
                used |= {
                    each.value
                    for each in ast.walk(value)
                    if isinstance(each, ast.Constant) and type(each.value) is int
                }
    assert named <= used  # a return in cli may be a count of something else
    assert {0, 1, 2, 130, 141, 143} <= named


METERED = {
    "plan": KINDS["trainfit-plan"],
    "simulate": RecordingSummary,
    "loader": KINDS["trainfit-loader"],
    "rehearse": KINDS["trainfit-rehearsal"],
    "watch": KINDS["trainfit-watch"],
    "pace": KINDS["trainfit-pace"],
    "verify": KINDS["trainfit-verification"],
    "sweep": KINDS["trainfit-sweep"],
}


def metrics_table() -> str:
    """The rows of the table, from the types."""
    lines = []
    for verb, kind in METERED.items():
        for key, what in kind.METRICS.items():
            lines.append(f"| {verb} | `{key}` | `{metric(key).short}` | {what} |")
    return "\n".join(lines)


def test_the_table_of_numbers_is_that_of_the_types() -> None:
    assert metrics_table() in GUIDE, f"the table should be:\n{metrics_table()}"
    metered = {kind for kind in (*KINDS.values(), RecordingSummary) if kind.METRICS}
    assert metered == set(METERED.values())


def test_the_workflow_uses_inputs_and_outputs_that_the_action_has() -> None:
    block = GUIDE.split("    jobs:\n")[1].split("\nThe DataLoader is left out")[0]
    workflow = yaml.safe_load("    jobs:\n" + block)
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    (step,) = (each for each in workflow["jobs"]["plan"]["steps"] if each.get("id") == "plan")
    assert set(step["with"]) <= set(action["inputs"])
    assert set(re.findall(r"steps\.plan\.outputs\.(\w+)", block)) <= set(action["outputs"])


def test_the_configuration_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainfit.cli.parser import read_words

    block = GUIDE.split("## Defaults: trainfit.toml\n\n")[1].split("\nThe nearest")[0]
    (tmp_path / "trainfit.toml").write_text(
        "\n".join(line[4:] for line in block.splitlines() if line.startswith("    "))
    )
    monkeypatch.chdir(tmp_path)
    found = read_words(["plan", "--", "python", "x.py"])[1]
    assert (found.gpu, found.headroom, len(found.fail_if)) == ("RTX 4090", 0.1, 2)
    assert read_words(["pace", "x.py:f"])[1].hz == (15.0, 30.0)


def test_the_adapters_are_those_that_there_are() -> None:
    import trainfit.integrations

    named = set(re.findall(r"from trainfit\.integrations import (\w+)", GUIDE))
    assert named == set(trainfit.integrations.__all__)
