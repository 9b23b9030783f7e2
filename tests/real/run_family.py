"""Runs families of the corpus by name (all without a name) and prints what came of each."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from corpus.results import chosen, measure

for family in chosen(sys.argv[1:]):
    got = measure(family)
    print(f"== {got.family}: {got.verdict} (expected {got.expected}) right={got.right}")
    print(f"   failure={got.failure} bare={got.bare.failure or got.bare.found}")
    for check in got.checks:
        if not check.holds:
            print(f"   {check.name}: wanted {check.wanted}, found {check.found} [{check.noted}]")
    print(f"   recommended {got.recommended} independent={got.independent}")
    print(f"   changed {got.files_changed[:6]} ({len(got.files_changed)})")
    for each in got.plans:
        first = each.first_wall_s or 0
        print(
            f"   plan@{each.start} wall {each.wall_s:.0f} s, CPU {each.cpu_s:.0f} s, first "
            f"{first:.0f} s, {each.runs} runs; bare {got.bare.wall_s:.0f} s, {got.bare.cpu_s:.0f} s"
        )
    print("   notes:", *got.notes, sep="\n     ", flush=True)
