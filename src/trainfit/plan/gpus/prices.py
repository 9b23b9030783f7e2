"""What GPUs cost an hour, from a file of the user's.

currency = "USD"

[per_hour]
"RTX 4090" = 0.44
"H100 SXM" = 2.49
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainfit.hardware import GpuNameError, find_gpu
from trainfit.results.files.errors import TrainfitError

_EXAMPLE: Final = 'write currency = "USD" and, below [per_hour], lines such as "RTX 4090" = 0.44'
_LONGEST_CURRENCY: Final = 12


class PriceFileError(TrainfitError):
    """A file of prices that cannot be used; the message names the place and the remedy."""


@dataclasses.dataclass(frozen=True)
class Prices:
    """Prices an hour by the GPU's key, in ``currency``; ``notes`` say where they are from."""

    currency: str
    per_hour: Mapping[str, float]
    notes: tuple[str, ...] = ()


def load_prices(path: Path) -> Prices:
    """Read a TOML file of prices; raises :class:`PriceFileError`."""
    document = _document(path)
    if unknown := sorted(set(document) - {"currency", "per_hour"}):
        raise PriceFileError(f"price file {str(path)!r}: unknown {unknown[0]!r}; {_EXAMPLE}")
    currency, table = document.get("currency", ""), document.get("per_hour")
    if not isinstance(currency, str) or len(currency) > _LONGEST_CURRENCY:
        raise PriceFileError(f"price file {str(path)!r}: currency {currency!r}; {_EXAMPLE}")
    if not isinstance(table, dict) or not table:
        raise PriceFileError(f"price file {str(path)!r} has no prices; {_EXAMPLE}")
    return Prices(currency, _by_key(path, table))


def _document(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise PriceFileError(f"price file {str(path)!r}: {reason}; check the path") from None
    except ValueError as error:  # no UTF-8, or no TOML
        raise PriceFileError(
            f"price file {str(path)!r} is not valid TOML ({error}); {_EXAMPLE}"
        ) from None


def _by_key(path: Path, table: Mapping[str, Any]) -> dict[str, float]:
    found: dict[str, float] = {}
    names: dict[str, str] = {}
    for name, price in table.items():
        try:
            key = find_gpu(name).key
        except GpuNameError as error:
            raise PriceFileError(f"price file {str(path)!r}: {error}") from None
        good = isinstance(price, int | float) and not isinstance(price, bool)
        if not good or not 0 < price < math.inf:
            raise PriceFileError(
                f"price file {str(path)!r}: {name!r} costs {price!r}; write a number above 0"
            )
        if key in names:
            raise PriceFileError(
                f"price file {str(path)!r}: {names[key]!r} and {name!r} are the same GPU; keep one"
            )
        found[key], names[key] = float(price), name
    return found
