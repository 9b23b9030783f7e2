"""What GPUs cost an hour: from a file of the user's, or at cloud providers.

The file::

    currency = "USD"

    [per_hour]
    "RTX 4090" = 0.44
    "H100 SXM" = 2.49

Providers' prices are from gpuhunt's catalogue (an extra; needs a network).
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from trainfit.hardware import GpuNameError, GpuSpec, catalogue, find_gpu
from trainfit.results.files.decoding import toml_document
from trainfit.results.files.errors import TrainfitError
from trainfit.results.text import GIB

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


def given_prices(source: Path | None) -> Prices | None:
    """The prices of ``--price``: a file's, or those of the market; raises
    :class:`PriceFileError`."""
    if source is None:
        return None
    return market_prices() if str(source) == MARKET else load_prices(source)


def load_prices(path: Path) -> Prices:
    """Read a TOML file of prices; raises :class:`PriceFileError`."""
    document = toml_document(path, "price", PriceFileError, _EXAMPLE)
    if unknown := sorted(set(document) - {"currency", "per_hour"}):
        raise PriceFileError(f"price file {str(path)!r}: unknown {unknown[0]!r}; {_EXAMPLE}")
    currency, table = document.get("currency", ""), document.get("per_hour")
    if not isinstance(currency, str) or len(currency) > _LONGEST_CURRENCY:
        raise PriceFileError(f"price file {str(path)!r}: currency {currency!r}; {_EXAMPLE}")
    if not isinstance(table, dict) or not table:
        raise PriceFileError(f"price file {str(path)!r} has no prices; {_EXAMPLE}")
    return Prices(currency, _by_key(path, table))


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


# ---
# What GPUs cost an hour at cloud providers, from gpuhunt's catalogue (an extra; needs a network).
#
# The library unifies the price lists of some twenty providers; its names leave out the form factor
# (SXM, PCIe), so that one entry may stand for several GPUs of the catalogue.


#: The word in place of a file.
MARKET: Final = "gpuhunt"
#: What providers say of a GPU's memory is up to so much more than it shows (a T4's 16 GB).
_MEMORY: Final = 0.1

Query = Callable[..., Iterable[Any]]


def market_prices(query: Query | None = None) -> Prices:
    """The cheapest on-demand price of one GPU of each kind, in US dollars.

    Args:
        query: ``gpuhunt.query`` (for tests).

    Raises :class:`PriceFileError` where there is no gpuhunt, or it cannot be asked.
    """
    found: dict[str, tuple[float, str]] = {}
    specs = catalogue()
    for item in _price_list(query):
        for spec in specs:
            if _is_of(item, spec) and item.price < found.get(spec.key, (float("inf"), ""))[0]:
                found[spec.key] = float(item.price), f"{item.provider}, {item.location}"
    if not found:
        raise PriceFileError(
            f"--price {MARKET}: it has no price for any GPU of the catalogue; give a file"
        )
    where = "; ".join(f"{key}: {source}" for key, (_, source) in sorted(found.items()))
    note = f"prices: the cheapest on-demand instance with one GPU that gpuhunt lists ({where})"
    return Prices("USD", {key: price for key, (price, _) in found.items()}, (note,))


def _price_list(query: Query | None) -> list[Any]:
    instead = "give a file of prices, as in --price prices.toml"
    try:
        ask: Query = query or importlib.import_module("gpuhunt").query
    except ImportError:
        raise PriceFileError(
            f"--price {MARKET}: it is not installed; pip install 'trainfit[prices]', or {instead}"
        ) from None
    try:
        items = list(ask(min_gpu_count=1, max_gpu_count=1, spot=False))
    except Exception as error:  # a network that is not there has many ways to say so
        said = " ".join(str(error).split())[:160]
        raise PriceFileError(
            f"--price {MARKET}: its catalogue cannot be read ({type(error).__name__}: {said}); "
            f"{instead}"
        ) from None
    return [item for item in items if item.gpu_name and item.gpu_memory and item.price > 0]


def _is_of(item: Any, spec: GpuSpec) -> bool:
    own = spec.memory_bytes / GIB
    if abs(item.gpu_memory - own) > _MEMORY * own:
        return False
    name = re.sub(r"[\s_-]", "", item.gpu_name.lower())
    whole = re.sub(r"\s|\d+gb|sxm|pcie", "", spec.key.lower())
    return name in (whole, whole.removeprefix("rtx"))
