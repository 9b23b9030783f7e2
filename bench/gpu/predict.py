"""Predicts the largest batch of a capped case; a process of its own for capped.py."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu.cases import Case
from gpu.simulated import import_trainfit, predict_largest, spec_of


def main(path: str) -> int:
    request = json.loads(Path(path).read_text())
    gpu = request["gpu"]
    spec = named(gpu) if isinstance(gpu, str) else spec_of(gpu)
    print(json.dumps({"largest": predict_largest(Case(**request["case"]), spec)}))
    return 0


def named(name: str) -> Any:
    import_trainfit()
    from trainfit.hardware import find_gpu

    return find_gpu(name)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
