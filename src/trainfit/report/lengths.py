"""The values of a tunable: the largest that fits, memory and time over (value, batch size)."""

from __future__ import annotations

from trainfit.report.blocks import Chart, Command, Facts, Section, Table, facts, figures, section
from trainfit.report.blocks import table as table_of
from trainfit.report.charts import COLORS, chart, color, tip, values, x, y
from trainfit.results.plan import TunablePoint, TunableSizes
from trainfit.results.runs.generation import ContextPoint, Generation
from trainfit.results.text import GIB, count, duration, rate, size

_GROWTHS = {
    "linear": "in proportion to it",
    "quadratic": "with its square",
    "mixed": "in part with its square",
}


def solved_text(found: TunableSizes | None) -> str:
    """The largest value that fits, as a sentence; empty where it was not asked for."""
    if found is None or found.largest is None:
        return ""
    batch = _present_batch(found)
    if not found.largest:
        return f"No {found.shown} that was simulated fits{batch}."
    text = f"Largest {found.shown}{batch}: {found.largest:,}"
    if found.too_large is not None:
        text += f" ({found.too_large:,} does not fit)"
    if found.recommended and found.recommended != found.largest:
        text += f", {found.recommended:,} with the safety margin"
    elif not found.recommended:
        text += ", none with the safety margin"
    if found.limit is not None and found.largest >= found.limit:
        text += f" ({found.limit_reason})"
    return text + "."


def length_sections(found: TunableSizes | None, capacity_bytes: int) -> list[Section]:
    """Nothing where no tunable was asked about."""
    if found is None:
        return []
    command = Command(found.command, "Run with it") if found.command else None
    return section(
        f"{found.shown}: memory and time (predicted)",
        _facts(found),
        command,
        _table(found),
        _chart(found, capacity_bytes),
    )


def _facts(found: TunableSizes) -> Facts | None:
    return facts(
        ("largest", _largest(found), 3),
        ("limit", _limit(found), 12),
        ("growth", _growth(found), 14),
        ("other batches", _others(found), 15),
        ("not known", found.reason, 5),
        lines=3,
    )


def _present_batch(found: TunableSizes) -> str:
    batch = next((each.batch_size for each in found.points if each.is_simulated), None)
    return f" at batch size {batch}" if batch else ""


def _largest(found: TunableSizes) -> str:
    if found.largest is None:
        return ""
    if not found.largest:
        return f"none that was simulated fits; {found.too_large or found.present:,} does not"
    text = f"{found.largest:,} fits{_present_batch(found)} (simulated)"
    if found.too_large is not None:
        text += f"; {found.too_large:,} does not"
    if found.recommended and found.recommended != found.largest:
        text += f"; {found.recommended:,} leaves the safety margin"
    return text


def _limit(found: TunableSizes) -> str:
    if found.limit is None:
        return ""
    return f"{found.limit:,}: {found.limit_reason}"


def _growth(found: TunableSizes) -> str:
    if not found.growth:
        return ""
    text = f"memory grows {_GROWTHS[found.growth]}"
    if found.quadratic_bytes:
        where = f", most of them in {found.quadratic_in}" if found.quadratic_in else ""
        text += f": {size(found.quadratic_bytes)} at {found.present:,} do{where}"
    return text


def _others(found: TunableSizes) -> str:
    """About the largest at other batch sizes."""
    limits = [
        f"{each.value:,} at {each.batch_size}" + (" (the limit)" if each.by_model else "")
        for each in found.limits
    ]
    return f"about {', '.join(limits)} (not simulated)" if limits else ""


def _table(found: TunableSizes) -> Table | None:
    cells = {(each.value, each.batch_size): each for each in found.points}
    lengths = sorted({value for value, _ in cells})
    batches = sorted({batch or 0 for _, batch in cells})
    rows = []
    for value in lengths:
        row = [cells.get((value, batch or None)) for batch in batches]
        rows.append((f"{value:,}", *("" if each is None else _cell(each) for each in row)))
    columns = [f"batch {batch}" if batch else "current batch" for batch in batches]
    return table_of(
        (found.shown, *columns),
        rows,
        "Device memory and the time of a step; * does not fit",
        range(1 + len(batches)),
        [place for place, value in enumerate(lengths) if value == found.present],
        detail=30,
    )


def _cell(point: TunablePoint) -> str:
    text = size(point.device_bytes)
    if point.step_s is not None:
        text += f", {duration(point.step_s)}"
    return text + ("" if point.fits else " *")


def _chart(found: TunableSizes, capacity_bytes: int) -> Chart | None:
    if len({each.value for each in found.points}) < 2:
        return None
    names = [str(batch) for batch in sorted({each.batch_size or 0 for each in found.points})]
    rows = [
        {
            "value": each.value,
            "memory": each.device_bytes / GIB,
            "batch": str(each.batch_size or 0),
            "tip": tip(
                f"{found.shown} {each.value:,}, batch size {each.batch_size or '-'}",
                ("device", size(each.device_bytes)),
                ("step", duration(each.step_s) if each.step_s is not None else "-"),
                ("fits", "yes" if each.fits else "no"),
            ),
        }
        for each in found.points
    ]
    says = solved_text(found) or (
        f"Device memory by {found.shown} and batch size; the GPU has {size(capacity_bytes)}."
    )
    spec = chart(
        280,
        says,
        layer=[
            {
                "data": values(rows),
                "mark": {"type": "line", "point": True, "tooltip": True},
                "encoding": {
                    "x": x("value", found.shown),
                    "y": y("memory", "device memory (GiB)"),
                    "color": color("batch", names, COLORS[: len(names)]),
                },
            },
            {
                "data": values([{"memory": capacity_bytes / GIB}]),
                "mark": {"type": "rule", "strokeDash": [6, 4]},
                "encoding": {"y": y("memory")},
            },
        ],
    )
    table = figures(
        (found.shown, "Batch size", "Device", "Step", "Fits", "From"),
        [
            (
                f"{each.value:,}",
                str(each.batch_size or "-"),
                size(each.device_bytes),
                duration(each.step_s) if each.step_s is not None else "-",
                "yes" if each.fits else "no",
                "its own run" if each.is_simulated else "two other batch sizes",
            )
            for each in found.points
        ],
        f"Memory and time by {found.shown} and batch size",
        (0, 1, 2, 3),
    )
    return Chart(f"Memory against {found.shown}, by batch size", says, spec, table)


# ---
# Generated text: its length, its KV cache, time by token, the longest context.


#: What is to be known of a kind of cache.
_CACHES = {
    "dynamic": "dynamic: copied with each token",
    "static": "static: allocated at once",
}


def generation_sections(found: Generation | None) -> list[Section]:
    """Nothing for a script that generates no text."""
    if found is None:
        return []
    return section("Generated text (predicted)", _generation_facts(found), _frontier(found))


def _generation_facts(found: Generation) -> Facts | None:
    cache = ""
    if found.cache_bytes is not None:
        cache = f"{size(found.cache_bytes)} at the end ({_CACHES.get(found.cache, found.cache)})"
        cache = cache.replace(" ()", "")
    return facts(
        ("text", _text(found), 8),
        ("KV cache", cache, 9),
        ("time", _time(found), 8),
        ("tokens/s", _rates(found), 8),
        ("context", _longest(found), 9),
    )


def _text(found: Generation) -> str:
    prompt = "" if found.prompt_tokens is None else f"{found.prompt_tokens:,} prompt + "
    text = f"{prompt}{found.new_tokens:,} new tokens"
    if found.sequences:
        text += f", {count(found.sequences, 'sequence')}"
    left = found.known_tokens - found.simulated_calls
    calls = f"{found.simulated_calls:,} of {found.new_tokens:,} calls simulated"
    if left > 0:
        calls += ", the others follow from them"
    return f"{text} (by {found.by}); {calls}"


def _time(found: Generation) -> str:
    if found.round_s is not None and not found.proposed:  # what is proposed stands in the prompt
        return f"{duration(found.round_s)} a call, which gives one token at least"
    if found.round_s is not None:
        return f"{duration(found.round_s)} for {found.proposed} proposed tokens and their check"
    if found.first_token_s is None or found.token_s is None or found.total_s is None:
        return ""
    first, last = map(duration, found.token_s)
    each = first if first == last else f"{first} (the first) to {last} (the last)"
    return (
        f"first token after {duration(found.first_token_s)}, then {each} a token; "
        f"{duration(found.total_s)} in all"
    )


def _rates(found: Generation) -> str:
    if found.round_s is not None and not found.proposed:
        return f"{rate(1 / found.round_s)} a sequence at least"
    if found.round_s is not None:
        least, most = (rate(each / found.round_s) for each in (1, 1 + found.proposed))
        return f"{least} a sequence where no proposal is accepted, {most} where all are"
    if found.tokens_per_s is None:
        return ""
    text = f"{rate(found.tokens_per_s)} a sequence"
    if found.all_tokens_per_s is not None and found.sequences != 1:
        text += f", {rate(found.all_tokens_per_s)} in all"
    return text


def _longest(found: Generation) -> str:
    point = found.longest
    if point is None:
        return ""
    at = f" at batch size {point.batch_size}" if point.batch_size else ""
    return f"longest that fits{at}: {_positions(point)}"


def _positions(point: ContextPoint) -> str:
    about = "about " if point.is_estimate else ""
    model = " (the model's limit)" if point.by_model else ""
    return f"{about}{point.positions:,} tokens{model}"


def _frontier(found: Generation) -> Table | None:
    return table_of(
        ("Batch size", "Longest context"),
        [(str(each.batch_size), _positions(each)) for each in found.frontier],
        "The longest context, prompt and new tokens together, that fits at a batch size",
        (0,),
        detail=45,
    )
