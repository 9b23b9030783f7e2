"""What the static reading of scripts found as SARIF 2.1.0, for code scanning and editors."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

from trainfit.results.doctor import ScriptReport
from trainfit.results.findings import Finding
from trainfit.version import __version__

_SCHEMA: Final = "https://json.schemastore.org/sarif-2.1.0.json"


def sarif_text(report: ScriptReport) -> str:
    """One SARIF document: a result for each finding, a notification for each file not read.

    Files below the working directory are named from there, which is the root of a repository where
    it is scanned.
    """
    rules = sorted({finding.kind for finding in report.findings})
    invocation: dict[str, Any] = {"executionSuccessful": True}
    if report.unread:
        invocation["toolExecutionNotifications"] = [
            {"level": "warning", "message": {"text": f"not read: {each}"}} for each in report.unread
        ]
    run = {
        "tool": {
            "driver": {
                "name": "trainfit",
                "semanticVersion": __version__,
                "rules": [_rule(rule) for rule in rules],
            }
        },
        "columnKind": "unicodeCodePoints",
        "invocations": [invocation],
        "results": [_result(finding, rules.index(finding.kind)) for finding in report.findings],
    }
    document = {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(document, indent=2, ensure_ascii=False)


def _rule(name: str) -> dict[str, Any]:
    text = f"{name.replace('-', ' ')}: costs memory or speed, or breaks portability"
    return {"id": name, "shortDescription": {"text": text}}


def _result(finding: Finding, rule: int) -> dict[str, Any]:
    region = {
        "startLine": finding.at.line,
        "startColumn": finding.at.column,
        "snippet": {"text": finding.at.source},
    }
    return {
        "ruleId": finding.kind,
        "ruleIndex": rule,
        "level": "warning",
        "message": {"text": f"{finding.cause} Write: {finding.fix.action}"},
        "locations": [
            {
                "physicalLocation": {
                    "artifactLocation": {"uri": _uri(finding.at.file)},
                    "region": region,
                }
            }
        ],
    }


def _uri(file: str) -> str:
    path = Path(os.path.abspath(file))
    here = Path.cwd()
    return quote(path.relative_to(here).as_posix()) if path.is_relative_to(here) else path.as_uri()
