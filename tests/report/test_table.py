"""Tables: every cell is there, on its own, at every width."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trainfit.report.layout import table, table_rows
from trainfit.results.text import laid_out_for

ROWS = [
    ("RTX 4090", "5.50 GiB", "57.1", "9 h 43 min", "limited by the CPU, which launches kernels"),
    ("Jetson AGX Orin 64GB (shared)", "61.1 GiB", "0.1", "2 min", ""),
]
HEAD = ("GPU", "memory", "per W", "the run", "remark")

_WORD = st.text("abc1%[]é", min_size=1, max_size=14)
_CELL = st.lists(_WORD, max_size=5).map(" ".join)
_TABLES = st.integers(1, 7).flatmap(
    lambda n: st.tuples(
        st.text("lrwv", min_size=n, max_size=n),
        st.lists(st.tuples(*[_CELL] * n), min_size=1, max_size=4),
        st.one_of(st.just(()), st.tuples(*[_WORD] * n)),
    )
)


def test_no_two_cells_run_together() -> None:
    with laid_out_for(80):
        lines = table(ROWS, "lrrrw", HEAD)
    assert "57.1  9 h 43 min" in lines[1] or "57.1 9 h 43 min" in lines[1]
    assert all(len(line) <= 80 for line in lines)


def test_columns_that_may_go_do_so_in_their_order() -> None:
    with laid_out_for(66):
        lines = table(ROWS, "lrrrw", HEAD, spare=("per W", "memory"))
    assert "per W" not in lines[0] and "memory" in lines[0]


@settings(max_examples=60, deadline=None)
@given(_TABLES, st.integers(60, 120))
def test_no_cell_is_cut_and_no_line_is_too_long(
    made: tuple[str, list[tuple[str, ...]], tuple[str, ...]], width: int
) -> None:
    kinds, rows, head = made
    with laid_out_for(width):
        lines = table(rows, kinds, head)
        groups = table_rows(rows, kinds, head)
    assert all(len(line) <= max(width, 20) for line in lines)
    # A word that is longer than its column goes on in the next line: characters are counted.
    shown, given_ = "".join(lines), "".join(cell for row in rows for cell in row)
    for character in "abc1%[]é":
        assert shown.count(character) >= given_.count(character)
    assert len(groups) in (len(rows), len(rows) + 1)


def test_rows_with_a_long_reason_are_a_list_where_their_column_would_be_narrow() -> None:
    reason = "keeps the effective batch size, as the loss is not divided by the accumulation. " * 3
    rows = [("--batch-size", "16 · kept", reason, "predicted, RTX 4090")]
    rows += [("PYTORCH_CUDA_ALLOC_CONF", "left unset", "it fits", "predicted, RTX 4090")]
    head = ("Parameter", "Value", "Why", "Evidence")
    with laid_out_for(80):
        lines = table(rows, "llwl", head)
    assert lines[0].strip() == "--batch-size" and lines[2].strip().startswith("Why: keeps the")
    assert len(lines) < 12 and all(len(line) <= 80 for line in lines)
    with laid_out_for(200):
        assert table(rows, "llwl", head)[0].split() == list(head)
