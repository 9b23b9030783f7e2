"""How libraries interpret thread variables that are not plain numbers.

Some ignore such a value, some read the beginning of it, MKL takes one thread, and NumExpr does not
start. Sources: GCC's ``libgomp/env.c`` (a list of positive integers, else "Invalid value" and as
without it), OpenBLAS' ``driver/others/openblas_env.c`` (``atoi``, nothing below 1; OMP_NUM_THREADS
likewise where its own says nothing), NumExpr's ``utils.py`` (``int``), and runs of PyTorch's
builds with MKL 2024.2 under each value: anything but digits gives ``torch.get_num_threads() == 1``,
0 and nothing are as if it were not set.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

#: The variables that set threads (or where they run).
THREAD_VARIABLES: Final = (
    "OMP_NUM_THREADS",
    "OMP_PROC_BIND",
    "OMP_PLACES",
    "OMP_WAIT_POLICY",
    "GOMP_CPU_AFFINITY",
    "KMP_AFFINITY",
    "KMP_BLOCKTIME",
    "MKL_NUM_THREADS",
    "MKL_DYNAMIC",
    "OPENBLAS_NUM_THREADS",
    "BLIS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "NUMEXPR_MAX_THREADS",
    "OPENCV_FOR_THREADS_NUM",
    "TORCH_NUM_THREADS",
    "RAYON_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
)

_OMP: Final = "OMP_NUM_THREADS"
_OPENBLAS: Final = "OPENBLAS_NUM_THREADS"
_MKL: Final = "MKL_NUM_THREADS"
_NUMEXPR: Final = ("NUMEXPR_NUM_THREADS", "NUMEXPR_MAX_THREADS")
#: Variables whose values are judged.
JUDGED: Final = (_OMP, _MKL, _OPENBLAS, *_NUMEXPR)
#: More digits than these overflow somewhere.
_DIGITS: Final = 9
#: Characters of a value that are shown.
_SHOWN: Final = 40


def misread(environment: Mapping[str, str]) -> dict[str, str]:
    """What comes of each variable that holds no plain number of threads, in words that follow its
    name and value; those that say what they mean are left out."""
    told = {_OMP: _of_openmp, _MKL: _of_mkl, _OPENBLAS: _of_openblas}
    told |= dict.fromkeys(_NUMEXPR, _of_numexpr)
    found = {}
    for name in JUDGED:
        if name in environment and (said := told[name](environment[name], environment)):
            found[name] = said
    return found


def misread_lines(environment: Mapping[str, str]) -> tuple[str, ...]:
    """The same, a line each, with what to do."""
    return tuple(
        f"{name}={environment[name][:_SHOWN]!r} {what}; set a positive integer, or unset it"
        for name, what in misread(environment).items()
    )


def _of_openmp(value: str, environment: Mapping[str, str]) -> str:
    if all(map(_is_count, value.split(","))):
        return ""
    said = "is ignored (OpenMP expects a positive integer): the default thread count applies"
    if (number := _leading(value)) and not _leading(environment.get(_OPENBLAS, "")):
        said += f"; OpenBLAS reads it as {number}"
    return said


def _of_mkl(value: str, _: Mapping[str, str]) -> str:
    if not is_one_thread_to_mkl(value):
        zero = value and not value.strip("0")
        return "is ignored: MKL uses its default thread count" if zero else ""
    return "is not a number to MKL, which then uses one thread, as does PyTorch on x86"


def is_one_thread_to_mkl(value: str) -> bool:
    """Does MKL take one thread for this MKL_NUM_THREADS, as it is not made of digits alone?"""
    return bool(value) and re.fullmatch("[0-9]+", value) is None


def _of_openblas(value: str, _: Mapping[str, str]) -> str:
    number = _leading(value)
    if not number:
        return f"is ignored: OpenBLAS follows {_OMP} instead, or uses one thread per CPU"
    return "" if _is_count(value) else f"is read as {number} by OpenBLAS"


def _of_numexpr(value: str, _: Mapping[str, str]) -> str:
    if not value or _is_count(value):
        return ""
    return "makes `import numexpr` fail (it expects a positive integer)"


def _is_count(text: str) -> bool:
    """One positive integer, as libraries that look closely want it."""
    word = text.strip().removeprefix("+")
    is_number = word.isascii() and word.isdigit() and len(word) <= _DIGITS
    return is_number and bool(word.strip("0"))


def _leading(text: str) -> int:
    """What C's ``atoi`` reads, if it is positive; else 0."""
    found = re.match(r"\s*\+?([0-9]{1,9})", text)
    return int(found[1]) if found else 0
