"""Prices of cloud providers, as gpuhunt tells them."""

from __future__ import annotations

import dataclasses
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import error_line, trainfit
from trainfit.plan.prices import PriceFileError, market_prices


@dataclasses.dataclass
class Item:
    """The fields of gpuhunt's ``CatalogItem`` that are read."""

    gpu_name: str | None
    gpu_memory: float | None
    price: float
    provider: str = "aws"
    location: str = "us-east-1"


def prices(*items: Item) -> dict[str, float]:
    return dict(market_prices(lambda **_: items).per_hour)


def test_the_cheapest_offer_counts() -> None:
    found = market_prices(
        lambda **_: [Item("RTX4090", 24, 0.7), Item("RTX4090", 24, 0.4, "vastai", "SE")]
    )
    assert dict(found.per_hour) == {"RTX 4090": 0.4} and found.currency == "USD"
    assert "RTX 4090: vastai, SE" in found.notes[0]


def test_only_single_gpus_on_demand_are_asked_for() -> None:
    asked: dict[str, Any] = {}

    def query(**words: Any) -> list[Item]:
        asked.update(words)
        return [Item("T4", 16, 0.5)]

    market_prices(query)
    assert asked == {"min_gpu_count": 1, "max_gpu_count": 1, "spot": False}


@pytest.mark.parametrize(
    ("name", "memory", "keys"),
    [
        ("A100", 40, ["A100 40GB PCIe", "A100 40GB SXM"]),
        ("A100", 80, ["A100 80GB PCIe", "A100 80GB SXM"]),
        ("H100", 80, ["H100 PCIe", "H100 SXM"]),
        ("H100NVL", 94, []),
        ("A6000", 48, ["RTX A6000"]),
        ("RTX6000Ada", 48, ["RTX 6000 Ada"]),
        ("RTX6000", 24, []),
        ("RTX3060", 12, ["RTX 3060 12GB"]),
        ("RTX PRO 6000", 96, ["RTX PRO 6000"]),
        ("V100", 16, ["V100 16GB PCIe", "V100 16GB SXM"]),
        ("L4", 24, ["L4"]),
        ("L40", 48, []),
        ("H200", 141, ["H200"]),
        ("B200", 180, ["B200"]),
    ],
)
def test_gpuhunts_names_are_the_catalogues(name: str, memory: float, keys: list[str]) -> None:
    known = prices(Item("T4", 16, 1.0), Item(name, memory, 2.0))
    assert sorted(known) == sorted(["T4", *keys])


def test_offers_without_a_gpu_or_a_price_are_left_out() -> None:
    assert prices(Item(None, None, 0.1), Item("T4", 16, 0.0), Item("L4", 24, 0.8)) == {"L4": 0.8}
    with pytest.raises(
        PriceFileError, match="it has no price for any GPU of the catalogue; give a file"
    ):
        prices(Item("MI300X", 192, 3.0))


def test_a_catalogue_that_cannot_be_read_is_told_of() -> None:
    def broken(**_: Any) -> list[Item]:
        raise ConnectionError("no\nroute")

    with pytest.raises(PriceFileError, match=r"cannot be read \(ConnectionError: no route\); give"):
        market_prices(broken)


def test_the_installed_library_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    module = types.SimpleNamespace(query=lambda **_: [Item("T4", 16, 0.35)])
    monkeypatch.setitem(sys.modules, "gpuhunt", module)
    assert dict(market_prices().per_hour) == {"T4": 0.35}


def test_without_it_a_line_says_how_to_get_it(tmp_path: Path) -> None:
    (tmp_path / "gpuhunt.py").write_text("raise ImportError\n")
    words = ("gpus", "T4", "--for", "plan.json", "--price", "gpuhunt")
    done = trainfit(*words, cwd=tmp_path)
    assert done.returncode == 2
    assert "--price gpuhunt: it is not installed; pip install 'trainfit[prices]'" in error_line(
        done
    )
