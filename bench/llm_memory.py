"""Memory of fine-tuning on one GPU, against published runs.

Peak allocated of fms-acceleration's rows on one A100 (_llm_rows.py says which packages they need),
and the reserved maximum of PEFT's method comparison on an L40S: Llama-3.2-3B, full and LoRA, four
samples of at most 768 tokens. Which lengths came together there is not published: the longest are
taken. Beside them what Accelerate's and DeepSpeed's rules of thumb give.

    python bench/llm_memory.py --data FOLDER [--packages DIR] [--quick] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from _bench import finish
from _llm_job import Job
from _llm_rows import Row, compared, fms, options, quick, read

LONGEST = 768


def main(argv: Sequence[str] | None = None) -> int:
    found = options(__doc__, argv)
    rows = fms(found.data, lambda gpus: gpus == 1)
    rows = quick(rows) if found.quick else rows
    figures, shown, details = compared("fms", rows, found.packages, "allocated", (0.7, 4.0))
    more, other, others = compared("peft", peft(found.data), found.packages, "reserved", (3, 3))
    return finish([*figures, *more], found.json, {"fms": details, "peft": others}, [shown, other])


def peft(folder: Path) -> list[Row]:
    """Rows of language models."""
    return [
        Row(
            Job(row["model"], "L40S", 1, int(row["batch_size"]), LONGEST,
                32 if row["experiment"].startswith("lora") else 0, "peft"),
            int(row["reserved_max_bytes"]),
        )
        for row in read(folder / "peft_l40s.csv")
        if row["task"] == "MetaMathQA"
    ]  # fmt: skip


if __name__ == "__main__":
    sys.exit(main())
