"""125 command lines that cannot work, as users mistype them, and the files that they name."""

from __future__ import annotations

from pathlib import Path
from typing import Final

#: Files next to which the commands are typed; ``train.py`` is README's.
FILES: Final = {
    "empty.py": "",
    "notes.txt": "not a result\n",
    "half.json": '{"kind": "trainfit-plan", ',
    "other.json": '{"name": "something else"}\n',
    "list.json": "[1, 2, 3]\n",
    "bad.toml": "currency = \n",
    "times.csv": "a,b\n1,2\n",
    "policy.py": "def act():\n    return 1\n",
}
_LINES: Final = """
trainfit
trainfit plna --gpu T4 -- python train.py
trainfit Plan --gpu T4 -- python train.py
trainfit train.py
trainfit -- python train.py
trainfit --gpu T4 plan -- python train.py
trainfit help plna
trainfit doktor
trainfit gpu
trainfit reports plan.json
trainfit plan
trainfit plan --
trainfit plan --gpu T4
trainfit plan --gpu T4 --
trainfit plan --gpu -- python train.py
trainfit plan --gpus T4 -- python train.py
trainfit plan --gpu "RTX 9999" -- python train.py
trainfit plan --gpu "" -- python train.py
trainfit plan --gpu custom: -- python train.py
trainfit plan --gpu custom:24 -- python train.py
trainfit plan --gpu custom:-1GiB -- python train.py
trainfit plan --gpu T4 -- python no_such_script.py
trainfit plan --gpu T4 -- no_such_program train.py
trainfit plan --gpu T4 -- python
trainfit plan --gpu T4 -- python -m no_such_module
trainfit plan --gpu T4 -- python notes.txt
trainfit plan --gpu T4 -- bash train.sh
trainfit plan --gpu T4 --headroom 2 -- python train.py
trainfit plan --gpu T4 --headroom lots -- python train.py
trainfit plan --gpu T4 --headroom -10% -- python train.py
trainfit plan --gpu T4 --steps 0 -- python train.py
trainfit plan --gpu T4 --steps many -- python train.py
trainfit plan --gpu T4 --steps 1.5 -- python train.py
trainfit plan --gpu T4 --time-limit never -- python train.py
trainfit plan --gpu T4 --time-limit -1 -- python train.py
trainfit plan --gpu T4 --other-processes much -- python train.py
trainfit plan --gpu T4 --cpu cores=many -- python train.py
trainfit plan --gpu T4 --cpu speed=9 -- python train.py
trainfit plan --gpu T4 --noise-scale none -- python train.py
trainfit plan --gpu T4 --noise-scale other.json -- python train.py
trainfit plan --gpu T4 --profile missing.json -- python train.py
trainfit plan --gpu T4 --profile notes.txt -- python train.py
trainfit plan --gpu T4 --remedies=magic -- python train.py
trainfit plan --gpu T4 --output no/such/folder/plan.json -- python train.py
trainfit plan --gpu T4 --output train.py -- python train.py
trainfit plan --gpu T4 --output . -- python train.py
trainfit plan --gpu T4 --keep-writes notes.txt -- python train.py
trainfit plan --gpu T4 -- python train.py --batch-size={batch:8}
trainfit plan --gpu T4 -- python train.py --batch-size={batch_size:eight}
trainfit plan --gpu T4 -- python train.py --batch-size={batch_size:0}
trainfit plan --gpu T4 -- python train.py --batch-size={batch_size:8} --more={batch_size:4}
trainfit plan --gpu T4 -- python train.py --no-such-option
trainfit simulate
trainfit simulate --gpu T4
trainfit simulate --gpu Voodoo2 train.py
trainfit simulate --gpu T4 missing.py
trainfit simulate --gpu T4 --steps x train.py
trainfit simulate --gpu T4 --batch-size -4 train.py
trainfit memory
trainfit memory missing.trainfit
trainfit memory notes.txt
trainfit memory half.json
trainfit memory .
trainfit loader
trainfit loader --
trainfit loader --step-time -5ms -- python train.py
trainfit loader --step-time soon -- python train.py
trainfit loader --step-time 5 parsecs -- python train.py
trainfit loader --confirm 9 -- python train.py
trainfit loader --ranks 0 -- python train.py
trainfit loader --max-workers none -- python train.py
trainfit loader --loader missing.py:make
trainfit loader --loader policy.py:nofn
trainfit loader --loader policy.py
trainfit loader --loader policy.py:act
trainfit loader --gpu "Voodoo 3" -- python train.py
trainfit loader -- python missing.py
trainfit rehearse --step-time 100ms
trainfit rehearse -- python missing.py
trainfit rehearse --step-time 10ms --duration never -- python train.py
trainfit rehearse --step-time 10ms --num-workers -2 -- python train.py
trainfit rehearse --step-time 10ms --compare missing.json -- python train.py
trainfit watch
trainfit watch --
trainfit watch --read missing
trainfit watch --read notes.txt
trainfit watch --read docs
trainfit watch --attach missing
trainfit watch --folder docs -- python train.py
trainfit watch --verify-runs 4 --verify -- python train.py
trainfit watch --verify-steps 0 --verify -- python train.py
trainfit compare
trainfit compare docs
trainfit compare docs missing
trainfit batch
trainfit batch explode
trainfit batch explain
trainfit batch explain missing.json --to 16
trainfit batch explain --noise-scale 210:260:170 --batch-size 64 --to 16
trainfit batch explain --noise-scale many --batch-size 64 --to 16
trainfit batch explain --noise-scale 210 --batch-size 0 --to 16
trainfit batch explain --noise-scale 210 --batch-size 64 --to 16 --data times.csv
trainfit pace
trainfit pace policy.py
trainfit pace policy.py:nofn
trainfit pace policy.py:act --hz 0
trainfit pace policy.py:act --hz fast
trainfit pace policy.py:act --hz 30 --fix luck
trainfit show missing.json
trainfit show half.json
trainfit show list.json
trainfit report other.json
trainfit report missing.json -o page.html
trainfit doctor --only everything
trainfit doctor --script missing.py
trainfit doctor --machine notes.txt
trainfit verify missing.json
trainfit gpus "RTX 9999"
trainfit gpus --for missing.json
trainfit gpus T4 --for other.json --price bad.toml
trainfit gpus T4 --output /dev/full
trainfit --help > /dev/full
trainfit show missing.json <&- >&-
trainfit memory docs
(mkdir gone && cd gone && rmdir ../gone && trainfit gpus T4)
"""
COMMANDS: Final = tuple(line for line in _LINES.splitlines() if line)


def prepare(folder: Path) -> None:
    """Write the files that the command lines name."""
    for name, text in FILES.items():
        (folder / name).write_text(text, "utf-8")
