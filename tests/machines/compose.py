"""Writes the composed machines next to this file, and the table in README.md.

    python tests/machines/compose.py

A machine is a list of parts (`parts`), laid over each other. What each stands for, and where
its texts are from, is in README.md.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import catalogue  # noqa: E402  (next to this file)

BEGIN, END = "<!-- table -->\n", "<!-- end of table -->\n"


def documents() -> dict[str, dict[str, Any]]:
    """Every composed machine by its name."""
    return {name: machine.document() for name, machine in catalogue.machines().items()}


def text(document: dict[str, Any]) -> str:
    """A document as it is written: one line for each file, so that changes can be read."""
    lines = []
    for key, value in document.items():
        if key in ("files", "calls", "commands", "probes") and value:
            inside = ",\n".join(f"  {_json(name)}: {_json(each)}" for name, each in value.items())
            lines.append(f" {_json(key)}: {{\n{inside}\n }}")
        else:
            lines.append(f" {_json(key)}: {_json(value)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def readme(machines: dict[str, dict[str, Any]]) -> str:
    """README.md with the table of ``machines``."""
    before, _, rest = (HERE / "README.md").read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    rows = ["| machine | origin | cause | what is special | from |", "|---|---|---|---|---|"]
    for name, each in sorted(machines.items()):
        cause = f"`{each['expected_cause']}`" if each["expected_cause"] else "none"
        cells = (f"`{name}`", each["origin"], cause, each["about"], each["provenance"])
        rows.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return before + BEGIN + "\n" + "\n".join(rows) + "\n\n" + END + after


def main() -> None:
    """Rewrite everything; a machine that is no longer composed is removed."""
    composed = documents()
    machines = dict(composed)
    for path in sorted(HERE.glob("*.json")):
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["origin"] == "recorded":
            machines[path.stem] = document
        elif path.stem not in composed:
            path.unlink()
    for name, document in composed.items():
        (HERE / f"{name}.json").write_text(text(document), encoding="utf-8")
    (HERE / "README.md").write_text(readme(machines), encoding="utf-8")
    print(f"{len(composed)} composed machines written")


if __name__ == "__main__":
    main()
