"""Where outcomes are kept: one JSON file a family, merged into docs/compatibility.json."""

from __future__ import annotations

import dataclasses
import json
import subprocess
from collections.abc import Sequence
from typing import Any

from corpus.families import all_families
from corpus.family import Family
from corpus.judge import Outcome, judged
from corpus.measure import ROOT, bare, places, planned, prepare, read_packages

STORE = ROOT / "docs" / "compatibility.json"


def measure(family: Family) -> Outcome:
    """Run a family whole and keep its outcome."""
    read_packages()
    work, data, home = places(family)
    prepare(family, work, data, home)
    alone = bare(family, work, data, home)
    plans = [planned(family, work, data, home, family.starts[0])]
    # Where the first failed, the second would only fail again.
    if plans[0].figures and not family.simulates:
        plans.append(planned(family, work, data, home, family.starts[1]))
    outcome = judged(family, alone, plans)
    keep(outcome)
    return outcome


def stored() -> dict[str, Any]:
    """Outcomes by family, as they were kept last."""
    if not STORE.exists():
        return {}
    found: dict[str, Any] = json.loads(STORE.read_text(encoding="utf-8"))
    return found


def keep(outcome: Outcome) -> None:
    """Put an outcome in the place of the family's last one; families that are gone go."""
    entry = {**dataclasses.asdict(outcome), "commit": _commit()}
    _write({**stored(), outcome.family: entry})


def _write(found: dict[str, Any]) -> None:
    names = [each.name for each in all_families()]
    ordered = {name: found[name] for name in names if name in found}
    part = STORE.with_suffix(".part")
    text = json.dumps(ordered, indent=1).replace(f"{ROOT}/", "")  # whose folders they were
    part.write_text(text + "\n", encoding="utf-8")
    part.replace(STORE)


def chosen(names: Sequence[str]) -> tuple[Family, ...]:
    """Families of these names, or all; raises ``ValueError`` for one that there is not."""
    known = {each.name: each for each in all_families()}
    missing = [name for name in names if name not in known]
    if missing:
        raise ValueError(f"no family {', '.join(missing)}; there are {', '.join(known)}")
    return tuple(known[name] for name in names) or tuple(known.values())


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip()
