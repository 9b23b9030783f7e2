"""Parts of charts: fewer points without losing those that matter, colours, labels."""

from __future__ import annotations

from trainfit.report.charts import (
    COLORS,
    LIGHT,
    MEMORY_KINDS,
    batch_marks,
    chart,
    standalone,
    thinned,
    tip,
    values,
    x,
)
from trainfit.report.sections.memory_charts import treemap
from trainfit.report.writers.html import _asset
from trainfit.results.runs.recording import KINDS


def test_few_items_stay_as_they_are_and_many_keep_ends_and_chosen_ones() -> None:
    assert thinned([1, 2, 3], 5) == [1, 2, 3]
    kept = thinned(range(1000), 10, keep=(501,))
    assert kept[0] == 0 and kept[-1] == 999 and 501 in kept
    assert len(kept) <= 11 and kept == sorted(kept)


def test_numbers_have_as_many_digits_as_can_be_seen() -> None:
    assert values([{"a": 1.23456789, "b": 12345678, "c": "x"}]) == {
        "values": [{"a": 1.23457, "b": 12345678, "c": "x"}]
    }


def test_a_tip_leaves_out_what_has_no_text() -> None:
    assert tip("title", ("a", "1"), ("b", "")) == [["title", ""], ["a", "1"]]


def test_a_picture_of_its_own_has_colours_for_the_pages_variables() -> None:
    spec = chart(10, "words", encoding={"x": x("a"), "color": {"value": "var(--bad)"}})
    alone = standalone(spec)
    assert alone["encoding"]["color"]["value"] == LIGHT["--bad"]
    assert alone["width"] == 860 and spec["width"] == "container"
    assert alone["config"]["background"] == "#ffffff"
    assert spec["config"]["background"] == "transparent"


def test_the_style_sheet_has_every_colour_in_each_of_its_forms() -> None:
    style = _asset("page.css")
    for name, value in LIGHT.items():
        # Light, dark and print.
        assert style.count(f"{name}:") == 3, name
        if name not in ("--card", "--text", "--muted", "--grid"):
            assert f"{name}: {value};" in style
    assert {color[4:-1] for color in COLORS} <= set(LIGHT)


def test_every_kind_of_memory_has_a_name_and_a_colour_of_its_own() -> None:
    assert set(MEMORY_KINDS) == set(KINDS)
    assert len({color for _, color in MEMORY_KINDS.values()}) == len(KINDS)


def test_labels_are_on_the_side_with_more_room() -> None:
    marks = [{"batch": 2, "label": "a"}, {"batch": 9, "label": "b"}]
    _, left, right = batch_marks(marks, 10, "batch size")
    assert left["mark"]["align"] == "left" and right["mark"]["align"] == "right"


def test_a_treemap_folds_small_owners_and_loses_no_byte() -> None:
    modules = {f"net.layer{n}.part": {"activations": 1000} for n in range(10)}
    modules |= {f"net.small.p{n}": {"parameters": 1} for n in range(3000)}
    found = treemap(modules, {"activations": "red", "parameters": "blue"})
    assert found is not None
    nodes = found.spec["data"][0]["values"]
    assert sum(node.get("bytes", 0) for node in nodes) == 10 * 1000 + 3000
    assert len(nodes) < 500
    assert found.note.startswith("3000 small owners")
    names = {node["id"] for node in nodes}
    assert all(node["parent"] in names for node in nodes if node["parent"] is not None)


def test_a_module_that_has_memory_of_its_own_and_children_keeps_both() -> None:
    found = treemap({"net": {"buffers": 2}, "net.a": {"buffers": 3}, "": {"inputs": 4}},
                    {"buffers": "red", "inputs": "blue"})  # fmt: skip
    assert found is not None
    sizes = {node["tip"][0][0]: node["bytes"] for node in found.spec["data"][0]["values"]
             if "bytes" in node}  # fmt: skip
    assert sizes == {"net": 2, "net.a": 3, "(no module)": 4}


def test_nothing_has_no_treemap() -> None:
    assert treemap({"net": {}}, {}) is None
