"""What GPUs cost an hour at cloud providers, from gpuhunt's catalogue (an extra; needs a network).

The library unifies the price lists of some twenty providers; its names leave out the form factor
(SXM, PCIe), so that one entry may stand for several GPUs of the catalogue.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from typing import Any, Final

from trainfit.hardware import GpuSpec, catalogue
from trainfit.plan.gpus.prices import PriceFileError, Prices

#: The word in place of a file.
MARKET: Final = "gpuhunt"
#: What providers say of a GPU's memory is up to so much more than it shows (a T4's 16 GB).
_MEMORY: Final = 0.1
_GIB: Final = 1 << 30

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
    own = spec.memory_bytes / _GIB
    if abs(item.gpu_memory - own) > _MEMORY * own:
        return False
    name = re.sub(r"[\s_-]", "", item.gpu_name.lower())
    whole = re.sub(r"\s|\d+gb|sxm|pcie", "", spec.key.lower())
    return name in (whole, whole.removeprefix("rtx"))
