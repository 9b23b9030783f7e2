"""Python's versions of operators, for simulated runs; a watched one imports no more than it has."""

from __future__ import annotations

from typing import Any

from trainfit.torch_private.needed import needed

with needed():
    from torch._decomp import decomposition_table

    #: By operator.
    decompositions: Any = decomposition_table
