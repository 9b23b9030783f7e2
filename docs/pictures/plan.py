"""Draws docs/pictures/plan.svg from a result file of ``trainfit plan --output``.

trainfit plan --gpu "RTX 4090" --output plan.json -- python examples/act/train.py …
python docs/pictures/plan.py plan.json
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich._export_format import CONSOLE_SVG_FORMAT
from rich.console import Console

from trainfit.cli.screen import styled
from trainfit.results.plan.result import PlanResult


def main() -> None:
    """Write the picture next to this file."""
    result = PlanResult.load(Path(sys.argv[1]))
    console = Console(
        record=True, width=82, file=io.StringIO(), force_terminal=True, highlight=False
    )
    console.print(f"$ trainfit plan --gpu '{result.gpu}' -- {result.command}\n", markup=False)
    for line in styled(result, 80):
        console.print(line)
    # The reader's own monospace font: a picture fetches nothing.
    template = re.sub(r"@font-face \{\{.*?\}\}", "", CONSOLE_SVG_FORMAT, flags=re.DOTALL)
    template = template.replace("Fira Code", "ui-monospace")
    path = Path(__file__).with_name("plan.svg")
    console.save_svg(str(path), title="trainfit plan", code_format=template)


if __name__ == "__main__":
    main()
