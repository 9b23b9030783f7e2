"""Generated text: its length, its KV cache, time by token, the longest context."""

from __future__ import annotations

from trainfit.report.blocks import Facts, Section, Table, facts, section
from trainfit.report.blocks import table as table_of
from trainfit.results.runs.generation import ContextPoint, Generation
from trainfit.results.text import count, duration, rate, size

#: What is to be known of a kind of cache.
_CACHES = {
    "dynamic": "dynamic: copied with each token",
    "static": "static: allocated at once",
}


def generation_sections(found: Generation | None) -> list[Section]:
    """Nothing for a script that generates no text."""
    if found is None:
        return []
    return section("Generated text (predicted)", _facts(found), _frontier(found))


def _facts(found: Generation) -> Facts | None:
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
    if found.first_token_s is None or found.token_s is None or found.total_s is None:
        return ""
    first, last = map(duration, found.token_s)
    each = first if first == last else f"{first} (the first) to {last} (the last)"
    return (
        f"first token after {duration(found.first_token_s)}, then {each} a token; "
        f"{duration(found.total_s)} in all"
    )


def _rates(found: Generation) -> str:
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
