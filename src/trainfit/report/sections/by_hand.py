"""The hand formula compared with the simulated peak."""

from __future__ import annotations

from trainfit.report.blocks import Headline, Subject, Text, section
from trainfit.report.blocks import table as table_of
from trainfit.results.memory import DifferenceCause, HandReport, HandRow
from trainfit.results.text import size, size_range

#: Rows with less than this share of both sums are one row together.
_SMALL = 0.02
#: Rows that have a line of their own, whatever they hold.
_ALONE = ("weights", "gradients", "optimizer's states", "input", "kept, and not in the formula")
_REST = "temporaries, workspaces"
#: Causes that the rows say already: what the 10 to 30% are for.
_SAID = ("temporaries", "workspaces")

_HEAD: tuple[str, ...] = ("Part", "By hand", "Simulated", "Difference", "Main causes")

#: Characters of a row's causes, and the share of the largest that another needs to be named.
_ROOM = 25
_WORTH = 0.1

_LABELS = {
    "not_kept": "freed at once",
    "in_place": "in place",
    "precision": "other type",
    "casts": "casts",
    "dropout": "dropout",
    "statistics": "indices",
    "weight_copies": "copies of weights",
    "used": "used up before",
    "later": "not computed yet",
    "fused": "fused: not kept",
    "gradients_missing": "not there at the peak",
    "frozen": "frozen parameters",
    "narrow_parameters": "other type",
    "unknown_optimizer": "no figure by hand",
    "states_missing": "made after the peak",
    "earlier": "kept from before",
    "uncounted": "other results",
    "input_freed": "freed before the peak",
    "other_inputs": "of another batch",
    "temporaries": "temporaries",
    "workspaces": "library workspaces",
    "buffers": "not in the formula",
    "rounding": "rounding",
}
_TEXTS = {
    "not_kept": "results that the backward pass does not need, freed at once",
    "in_place": "computed in place: no result of their own",
    "casts": "autocast's casts of activations, kept for the backward pass",
    "dropout": "masks and results of dropout, which the formula leaves out",
    "statistics": "indices and statistics that the backward pass needs",
    "weight_copies": "autocast keeps a half-precision copy of the weights",
    "later": "results that are not computed yet at the peak",
    "fused": "fused attention keeps neither scores nor probabilities",
    "frozen": "frozen parameters have no gradient and no state",
    "narrow_parameters": "parameters of another type than 4 bytes",
    "states_missing": "the optimizer makes its states in its first step, after the peak",
    "earlier": "kept since an earlier step or micro-batch",
    "input_freed": "inputs that were freed before the peak",
    "other_inputs": "other inputs on the GPU, of another batch",
    "buffers": "buffers of the model, which the formula leaves out",
    "rounding": "the allocator's rounding to its blocks",
}
_GRADIENTS_MISSING = {
    "backward": "gradients that do not exist at the peak: the backward pass makes them one by one",
    "forward": "no gradients at the peak: they are freed between steps",
}
_USED = {
    "backward": "results that the backward pass has used and freed before the peak",
    "optimizer": "no activations at the peak, which is in the optimizer's step",
}


def by_hand_subject(report: HandReport) -> Subject:
    """The sums, their parts, then the causes of the difference, the largest first."""
    low, high = _sums_by_hand(report)
    answer = (
        f"By hand {size_range(low, high)}, simulated {size(report.allocated_bytes)} at the peak in "
        f"the {report.moment.phase} of step {report.moment.step}"
    )
    head, how = _head(report)
    causes = table_of(
        ("Difference", "Cause"), _causes(report), numeric=(0,), noun="cause", detail=6
    )
    return Subject(
        Headline("Memory by hand", "plain", answer, limit=how, subject=head),
        (
            *section("Parts", table_of(_HEAD, _rows(report), numeric=(1, 2, 3),
                                       spare=("Difference",), detail=2),
                     Text(_twice(report), detail=30)),
            *section(_between(report), causes),
        ),
    )  # fmt: skip


def _head(report: HandReport) -> tuple[str, str]:
    """Which recording, and what the formula is for it."""
    batch = "unknown" if report.batch_size is None else str(report.batch_size)
    optimizer = report.optimizer or "no optimizer known"
    each = 8 + (report.state_bytes or 0)
    moment = report.moment
    return (
        f"{report.file}: hand formula and simulation ({report.gpu}, batch size {batch})",
        f"{report.parameters / 1e6:.3g} million parameters x {each} bytes ({optimizer}), results "
        f"of layers x {report.activation_bytes} bytes (computed in {report.compute}); peak in the "
        f"{moment.phase} of step {moment.step}",
    )


def _between(report: HandReport) -> str:
    return (
        f"From the hand formula ({size(report.by_hand_bytes)}) to the simulated value "
        f"({size(_kept(report))})"
    )


def _rows(report: HandReport) -> list[tuple[str, ...]]:
    """The parts, without what is too small for a row, and their sums."""
    least = _SMALL * max(report.by_hand_bytes, report.allocated_bytes)
    shown: list[HandRow] = []
    small: list[HandRow] = []
    for row in report.rows:
        if row.name == _REST:
            continue
        large = max(row.by_hand_bytes or 0, row.simulated_bytes) >= least
        (shown if large or row.name in _ALONE else small).append(row)
    rows = [_numbers(row, _labels(report, row.name)) for row in shown]
    if small:
        hand = sum(row.by_hand_bytes or 0 for row in small)
        together = HandRow("others", hand, sum(row.simulated_bytes for row in small))
        rows.append(_numbers(together, ", ".join(row.name for row in small)))
    low, high = _sums_by_hand(report)
    rest = size(report.allocated_bytes - _kept(report))
    for_rest = size_range(*report.buffer_bytes)
    rows += [
        ("10 to 30% for the rest", for_rest, rest, "", _labels(report, _REST)),
        ("allocated", size_range(low, high), size(report.allocated_bytes), "", ""),
    ]
    return rows


def _sums_by_hand(report: HandReport) -> tuple[int, int]:
    low, high = report.buffer_bytes
    return report.by_hand_bytes + low, report.by_hand_bytes + high


def _numbers(row: HandRow, why: str) -> tuple[str, ...]:
    hand = "-" if row.by_hand_bytes is None else size(row.by_hand_bytes)
    difference = size(row.difference_bytes, signed=True)
    return row.name, hand, size(row.simulated_bytes), difference, why


def _labels(report: HandReport, row: str) -> str:
    """The largest causes of a row's difference, as many as there is room for."""
    causes = sorted(
        ((cause.rows[row], cause.name) for cause in report.causes if cause.rows.get(row)),
        key=lambda each: -abs(each[0]),
    )
    text = ""
    for nbytes, name in causes:
        label = "kept in float32" if name == "precision" and nbytes > 0 else _LABELS[name]
        if abs(nbytes) < _WORTH * abs(causes[0][0]) or len(text) + len(label) + 2 > _ROOM:
            break
        text += f", {label}" if text else label
    return text


def _twice(report: HandReport) -> str:
    return (
        f"with each result twice, for its gradient: {size(report.doubled_bytes)} by hand; but the "
        "backward pass frees gradients of results as it goes: all of its temporaries have "
        f"{size(report.most_temporaries_bytes)} at most"
    )


def _kept(report: HandReport) -> int:
    """What the simulated peak has in rows of the formula's parts."""
    rest = sum(row.simulated_bytes for row in report.rows if row.name == _REST)
    return report.allocated_bytes - rest


def _causes(report: HandReport) -> list[tuple[str, str]]:
    rows = [
        (size(cause.nbytes, signed=True), _text(report, cause))
        for cause in report.causes
        if cause.name not in _SAID
    ]
    if report.unexplained_rows:
        named = ", ".join(
            f"{name} {size(n, signed=True)}" for name, n in report.unexplained_rows.items()
        )
        unexplained = size(report.unexplained_bytes, signed=True)
        rows.insert(0, (unexplained, f"not explained: {named}"))
    return rows


def _text(report: HandReport, cause: DifferenceCause) -> str:
    phase = report.moment.phase
    if cause.name == "gradients_missing":
        return _GRADIENTS_MISSING.get(phase, "gradients that were freed before the peak")
    if cause.name == "used":
        return _USED.get(phase, "results that were freed before the peak")
    if cause.name == "unknown_optimizer":
        name = report.optimizer or "this optimizer"
        return f"the formula has no figure for the states of {name}"
    if cause.name == "uncounted":
        return f"results that the formula leaves out ({', '.join(cause.operators)})"
    if cause.name == "precision":
        wide = "float32" if cause.nbytes > 0 else "a narrower type"
        return f"kept in {wide} where the formula has {report.activation_bytes} bytes"
    return _TEXTS[cause.name]
