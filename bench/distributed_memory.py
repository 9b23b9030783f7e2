"""Peak allocated memory of rank 0, on one GPU and by FSDP on two: ``llm_memory.py --fsdp``.

python bench/distributed_memory.py --data FOLDER [--packages DIR] [--quick] [--json]
"""

from __future__ import annotations

import sys

from llm_memory import main

if __name__ == "__main__":
    sys.exit(main([*sys.argv[1:], "--fsdp"]))
