"""What a launcher (torchrun, accelerate launch) would start, as its own code reads its words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Final, Literal

from trainfit.results.files.exchange import Exchanged

#: Launchers by the module that ``python -m`` runs.
LAUNCHER_MODULES: Final = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torch.distributed.launch",
    "accelerate.commands.launch": "accelerate",
}


@dataclasses.dataclass(frozen=True)
class Launched(Exchanged):
    """The processes that a launcher starts.

    ``processes`` is their number on all machines together; ``words`` how many of the launcher's
    last words are the script and its arguments; ``kind`` says what the first of them is.
    ``arguments`` come before the script's own. ``variables`` are what the process of rank 0 finds
    in its environment in addition to the launcher's. ``error``: why the launcher refuses its words,
    else empty.
    """

    processes: int = 1
    words: int = 0
    kind: Literal["script", "module", "program"] = "script"
    arguments: tuple[str, ...] = ()
    variables: Mapping[str, str] = dataclasses.field(default_factory=dict)
    error: str = ""
