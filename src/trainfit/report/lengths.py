"""The values of a tunable: the largest that fits, memory and time over (value, batch size)."""

from __future__ import annotations

from trainfit.report.blocks import Chart, Facts, Section, Snippet, Table, facts, figures, section
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


def solved_text(sizes: TunableSizes | None) -> str:
    """The largest value that fits, as a sentence; empty where it was not asked for."""
    if sizes is None or sizes.largest is None:
        return ""
    batch = _present_batch(sizes)
    if not sizes.largest:
        return f"No {sizes.shown} that was simulated fits{batch}."
    text = f"Largest {sizes.shown}{batch}: {sizes.largest:,}"
    if sizes.too_large is not None:
        text += f" ({sizes.too_large:,} does not fit)"
    if sizes.recommended and sizes.recommended != sizes.largest:
        text += f", {sizes.recommended:,} with the safety margin"
    elif not sizes.recommended:
        text += ", none with the safety margin"
    if sizes.limit is not None and sizes.largest >= sizes.limit:
        text += f" ({sizes.limit_reason})"
    return text + "."


def length_sections(sizes: TunableSizes | None, capacity_bytes: int) -> list[Section]:
    """Nothing where no tunable was asked about."""
    if sizes is None:
        return []
    command = Snippet(sizes.command, "Run with it") if sizes.command else None
    return section(
        f"{sizes.shown}: memory and time (predicted)",
        _facts(sizes),
        command,
        _table(sizes),
        _chart(sizes, capacity_bytes),
    )


def _facts(sizes: TunableSizes) -> Facts | None:
    return facts(
        ("largest", _largest(sizes), 3),
        ("limit", _limit(sizes), 12),
        ("growth", _growth(sizes), 14),
        ("other batches", _others(sizes), 15),
        ("not known", sizes.reason, 5),
        lines=3,
    )


def _present_batch(sizes: TunableSizes) -> str:
    batch = next((point.batch_size for point in sizes.points if point.is_simulated), None)
    return f" at batch size {batch}" if batch else ""


def _largest(sizes: TunableSizes) -> str:
    if sizes.largest is None:
        return ""
    if not sizes.largest:
        return f"none that was simulated fits; {sizes.too_large or sizes.present:,} does not"
    text = f"{sizes.largest:,} fits{_present_batch(sizes)} (simulated)"
    if sizes.too_large is not None:
        text += f"; {sizes.too_large:,} does not"
    if sizes.recommended and sizes.recommended != sizes.largest:
        text += f"; {sizes.recommended:,} leaves the safety margin"
    return text


def _limit(sizes: TunableSizes) -> str:
    if sizes.limit is None:
        return ""
    return f"{sizes.limit:,}: {sizes.limit_reason}"


def _growth(sizes: TunableSizes) -> str:
    if not sizes.growth:
        return ""
    text = f"memory grows {_GROWTHS[sizes.growth]}"
    if sizes.quadratic_bytes:
        where = f", most of them in {sizes.quadratic_in}" if sizes.quadratic_in else ""
        text += f": {size(sizes.quadratic_bytes)} at {sizes.present:,} do{where}"
    return text


def _others(sizes: TunableSizes) -> str:
    """About the largest at other batch sizes."""
    limits = [
        f"{limit.value:,} at {limit.batch_size}" + (" (the limit)" if limit.by_model else "")
        for limit in sizes.limits
    ]
    return f"about {', '.join(limits)} (not simulated)" if limits else ""


def _table(sizes: TunableSizes) -> Table | None:
    cells = {(point.value, point.batch_size): point for point in sizes.points}
    lengths = sorted({value for value, _ in cells})
    batches = sorted({batch or 0 for _, batch in cells})
    rows = []
    for value in lengths:
        row = [cells.get((value, batch or None)) for batch in batches]
        rows.append((f"{value:,}", *("" if cell is None else _cell(cell) for cell in row)))
    columns = [f"batch {batch}" if batch else "current batch" for batch in batches]
    return table_of(
        (sizes.shown, *columns),
        rows,
        "Device memory and the time of a step; * does not fit",
        range(1 + len(batches)),
        [place for place, value in enumerate(lengths) if value == sizes.present],
        detail=30,
    )


def _cell(point: TunablePoint) -> str:
    text = size(point.device_bytes)
    if point.step_s is not None:
        text += f", {duration(point.step_s)}"
    return text + ("" if point.fits else " *")


def _chart(sizes: TunableSizes, capacity_bytes: int) -> Chart | None:
    if len({point.value for point in sizes.points}) < 2:
        return None
    names = [str(batch) for batch in sorted({point.batch_size or 0 for point in sizes.points})]
    rows = [
        {
            "value": point.value,
            "memory": point.device_bytes / GIB,
            "batch": str(point.batch_size or 0),
            "tip": tip(
                f"{sizes.shown} {point.value:,}, batch size {point.batch_size or '-'}",
                ("device", size(point.device_bytes)),
                ("step", duration(point.step_s) if point.step_s is not None else "-"),
                ("fits", "yes" if point.fits else "no"),
            ),
        }
        for point in sizes.points
    ]
    says = solved_text(sizes) or (
        f"Device memory by {sizes.shown} and batch size; the GPU has {size(capacity_bytes)}."
    )
    spec = chart(
        280,
        says,
        layer=[
            {
                "data": values(rows),
                "mark": {"type": "line", "point": True, "tooltip": True},
                "encoding": {
                    "x": x("value", sizes.shown),
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
        (sizes.shown, "Batch size", "Device", "Step", "Fits", "From"),
        [
            (
                f"{point.value:,}",
                str(point.batch_size or "-"),
                size(point.device_bytes),
                duration(point.step_s) if point.step_s is not None else "-",
                "yes" if point.fits else "no",
                "its own run" if point.is_simulated else "two other batch sizes",
            )
            for point in sizes.points
        ],
        f"Memory and time by {sizes.shown} and batch size",
        (0, 1, 2, 3),
    )
    return Chart(f"Memory against {sizes.shown}, by batch size", says, spec, table)


# ---
# Generated text: its length, its KV cache, time by token, the longest context.


#: What is to be known of a kind of cache.
_CACHES = {
    "dynamic": "dynamic: copied with each token",
    "static": "static: allocated at once",
}


def generation_sections(generation: Generation | None) -> list[Section]:
    """Nothing for a script that generates no text."""
    if generation is None:
        return []
    return section(
        "Generated text (predicted)", _generation_facts(generation), _frontier(generation)
    )


def _generation_facts(generation: Generation) -> Facts | None:
    cache = ""
    if generation.cache_bytes is not None:
        kind = _CACHES.get(generation.cache, generation.cache)
        cache = f"{size(generation.cache_bytes)} at the end ({kind})"
        cache = cache.replace(" ()", "")
    return facts(
        ("text", _text(generation), 8),
        ("KV cache", cache, 9),
        ("time", _time(generation), 8),
        ("tokens/s", _rates(generation), 8),
        ("context", _longest(generation), 9),
    )


def _text(generation: Generation) -> str:
    prompt = "" if generation.prompt_tokens is None else f"{generation.prompt_tokens:,} prompt + "
    text = f"{prompt}{generation.new_tokens:,} new tokens"
    if generation.sequences:
        text += f", {count(generation.sequences, 'sequence')}"
    left = generation.known_tokens - generation.simulated_calls
    calls = f"{generation.simulated_calls:,} of {generation.new_tokens:,} calls simulated"
    if left > 0:
        calls += ", the others follow from them"
    return f"{text} (by {generation.by}); {calls}"


def _time(generation: Generation) -> str:
    if (
        generation.round_s is not None and not generation.proposed
    ):  # what is proposed stands in the prompt
        return f"{duration(generation.round_s)} a call, which gives one token at least"
    if generation.round_s is not None:
        asked = f"{generation.proposed} proposed tokens and their check"
        return f"{duration(generation.round_s)} for {asked}"
    if generation.first_token_s is None or generation.token_s is None or generation.total_s is None:
        return ""
    first, last = map(duration, generation.token_s)
    text = first if first == last else f"{first} (the first) to {last} (the last)"
    return (
        f"first token after {duration(generation.first_token_s)}, then {text} a token; "
        f"{duration(generation.total_s)} in all"
    )


def _rates(generation: Generation) -> str:
    if generation.round_s is not None and not generation.proposed:
        return f"{rate(1 / generation.round_s)} a sequence at least"
    if generation.round_s is not None:
        least, most = (rate(each / generation.round_s) for each in (1, 1 + generation.proposed))
        return f"{least} a sequence where no proposal is accepted, {most} where all are"
    if generation.tokens_per_s is None:
        return ""
    text = f"{rate(generation.tokens_per_s)} a sequence"
    if generation.all_tokens_per_s is not None and generation.sequences != 1:
        text += f", {rate(generation.all_tokens_per_s)} in all"
    return text


def _longest(generation: Generation) -> str:
    point = generation.longest
    if point is None:
        return ""
    text = f" at batch size {point.batch_size}" if point.batch_size else ""
    return f"longest that fits{text}: {_positions(point)}"


def _positions(point: ContextPoint) -> str:
    about = "about " if point.is_estimate else ""
    model = " (the model's limit)" if point.by_model else ""
    return f"{about}{point.positions:,} tokens{model}"


def _frontier(generation: Generation) -> Table | None:
    return table_of(
        ("Batch size", "Longest context"),
        [
            (str(context_point.batch_size), _positions(context_point))
            for context_point in generation.frontier
        ],
        "The longest context, prompt and new tokens together, that fits at a batch size",
        (0,),
        detail=45,
    )
