"""Peak allocated memory of rank 0 under FSDP, against published fine-tuning on 1 and 2 GPUs.

The rows of fms-acceleration's benchmark (_llm_rows.py says which packages they need): Mistral-7B
and PowerLM-3B, full and LoRA, in the Trainer's own loop with gradient checkpointing; two GPUs by
FSDP's full shards. Beside them what Accelerate's and DeepSpeed's rules of thumb give.

    python bench/distributed_memory.py --data FOLDER [--packages DIR] [--quick] [--json]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from _bench import finish
from _llm_rows import compared, fms, options, quick


def main(argv: Sequence[str] | None = None) -> int:
    found = options(__doc__, argv)
    rows = fms(found.data, lambda gpus: True)
    rows = quick(rows) if found.quick else rows
    figures, shown, details = compared("fsdp", rows, found.packages, "allocated", (1.0, 5.0))
    return finish(figures, found.json, details, [shown])


if __name__ == "__main__":
    sys.exit(main())
