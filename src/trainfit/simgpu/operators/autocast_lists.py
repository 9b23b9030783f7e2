"""Which operator has which policy under autocast, as the installed PyTorch's header lists them.

Plans read the lists, too: finding the header does not import PyTorch.
"""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

_EXTRA_LOWER = ("cudnn_convolution", "cudnn_convolution_transpose")


def policies() -> dict[str, list[str]]:
    """Operator names (``"aten::linear"``, ``"aten::pow.Tensor_Scalar"``) by policy.

    Policies: ``lower`` (autocast's dtype), ``float32``, ``set_dtype`` (float32 through
    ``dtype=``), ``append_dtype`` (likewise, appended), ``promote`` (widest of the operands).
    """
    text = _header().read_text()
    return {
        "lower": _macro(text, "AT_FORALL_LOWER_PRECISION_FP")
        + [f"aten::{name}" for name in _EXTRA_LOWER],
        "float32": _macro(text, "AT_FORALL_FP32"),
        "set_dtype": _macro(text, "AT_FORALL_FP32_SET_OPT_DTYPE"),
        "append_dtype": ["aten::norm.Scalar", "aten::norm.ScalarOpt_dim"],
        "promote": _macro(text, "AT_FORALL_PROMOTE"),
    }


def _macro(text: str, name: str) -> list[str]:
    body = re.search(rf"#define {name}\(_\)((?:.*\\\n)+.*)", text)
    assert body is not None, f"{_header()} has no {name}"
    entries = re.findall(r"_\(\s*(\w+)(?:,\s*(\w+))?\s*\)", body.group(1))
    return [f"aten::{op}.{overload}" if overload else f"aten::{op}" for op, overload in entries]


def _header() -> Path:
    found = find_spec("torch")
    assert found is not None and found.origin is not None, "PyTorch is not installed"
    return Path(found.origin).parent / "include" / "ATen" / "autocast_mode.h"
