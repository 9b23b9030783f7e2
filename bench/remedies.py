"""The what-if list of the reference workload: all remedies for ACT on an RTX 4090.

Runs `trainfit plan --remedies` on examples/act (the data set is made if it is absent) and
reports how long it took, how many remedies have figures, and whether one failed. The time is
meant for two cores on which nothing else runs; so the load of the machine is printed, and the
CPU time of all processes, of which two cores need half as wall time.

    python bench/remedies.py [--dataset DIR] [--quick] [--json]
"""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path
from typing import Any

from _bench import GIB, BenchFigure, finish, parser, table
from act import DATASET, make_dataset, run_plan

#: What --quick tries: one of each sort.
QUICK = "checkpoint,attention-weights,optimizer-8bit,expandable-segments"


def main() -> int:
    made = parser(__doc__, quick=f"only {QUICK}")
    made.add_argument("--dataset", type=Path, default=DATASET)
    options = made.parse_args()
    make_dataset(options.dataset)
    load = os.getloadavg()[0]
    plan = run_plan(options.dataset, f"--remedies={QUICK}" if options.quick else "--remedies")
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = used.ru_utime + used.ru_stime
    remedies = plan["remedies"]
    tried = [item for item in remedies["items"] if item["status"] != "not applicable"]
    failed = [item for item in tried if item["status"] == "failed"]
    figures = [
        BenchFigure("act_remedies_seconds", plan["seconds"], 90.0, True, " s"),
        BenchFigure("act_remedies_tried", len(tried), 4 if options.quick else 10, False),
        BenchFigure("act_remedies_failed", len(failed), 0, True),
    ]
    details = {
        "remedies": remedies,
        "seconds": plan["seconds"],
        "load_before": load,
        "cpu_seconds": cpu,
    }
    return finish(figures, options.json, details, [listed(remedies)])


def listed(remedies: dict[str, Any]) -> str:
    """A row for each remedy with figures, best first; GiB."""
    rows = [("(as written)", *_gib(remedies["before"]), remedies["largest_batch"], None)]
    for item in remedies["items"]:
        if item["memory"] is not None:
            flops = f"{100 * item['extra']['flops_share']:+.0f}%" if item["extra"] else "?"
            rows.append((item["name"], *_gib(item["memory"]), item["largest_batch"], flops))
    return table(("remedy, GiB", "allocated", "reserved", "largest", "FLOPs"), rows)


def _gib(memory: dict[str, Any]) -> tuple[float, ...]:
    return tuple(memory[f"{kind}_bytes"] / GIB for kind in ("allocated", "reserved"))


if __name__ == "__main__":
    sys.exit(main())
