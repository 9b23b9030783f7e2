"""The live view of a run: the verdict, a bar of phases, strips of GPU and CPU, the finding."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.console import Group, RenderableType
from rich.text import Text

from trainfit.report.watch.words import PHASES, answer, setting_text, title
from trainfit.results.format import duration, percent, rate, size
from trainfit.results.text import printable
from trainfit.results.watch.result import WatchResult

_COLOURS: Final = {
    "input": "red",
    "copy": "magenta",
    "forward": "green",
    "backward": "blue",
    "optimizer": "cyan",
    "sync": "yellow",
    "checkpoint": "bright_magenta",
    "evaluation": "bright_blue",
    "other": "white",
}
_LEVELS: Final = "▁▂▃▄▅▆▇█"
_STRIP: Final = 48


def live_view(result: WatchResult | None, seconds: float, printed: str = "") -> RenderableType:
    """What is drawn again each second; ``printed`` is a line that the script has not ended."""
    head = Text(f"trainfit watch  {duration(seconds)}", style="dim")
    tail = [Text(printable(printed), overflow="ellipsis", no_wrap=True)] if printed else []
    if result is None or not result.steps:
        return Group(*tail, head, Text("no training step yet"))
    parts: list[RenderableType] = [*tail, head, Text(answer(result), style="bold")]
    parts.append(_phase_bar(result))
    parts += _strips(result)
    if result.ledger is not None and result.ledger.points:
        parts.append(_memory(result))
    for each in result.findings[:2]:
        style = {"critical": "bold red", "warning": "yellow", "info": "dim"}[each.severity]
        setting = setting_text(each)
        parts.append(Text(f"{title(each)}{f' → {setting}' if setting else ''}", style=style))
    return Group(*parts)


def strip(values: Sequence[float | None], cells: int = _STRIP) -> str:
    """The last values, 0 to 1, as bars; a blank where nothing was measured."""
    shown = values[-cells:]
    return "".join(
        " " if value is None else _LEVELS[min(7, max(0, int(8 * value)))] for value in shown
    )


def _phase_bar(result: WatchResult) -> Text:
    bar = Text()
    for each in result.phases:
        cells = round(_STRIP * each.share)
        bar.append("█" * cells, style=_COLOURS[each.name])
    bar.append("\n")
    for each in sorted(result.phases, key=lambda phase: -phase.share)[:4]:
        if each.share >= 0.01:
            bar.append("■ ", style=_COLOURS[each.name])
            bar.append(f"{PHASES[each.name]} {percent(each.share)}  ")
    return bar


def _strips(result: WatchResult) -> list[Text]:
    rows = []
    gpu = [each.gpu_utilization for each in result.timeline]
    if any(each is not None for each in gpu):
        now = next(each for each in reversed(gpu) if each is not None)
        rows.append(Text(f"GPU  {strip(gpu)} {percent(now)}", style="green"))
    cores = [each.cores_busy for each in result.timeline]
    most = result.header.usable_cores
    if most and any(each is not None for each in cores):
        shares = [None if each is None else each / most for each in cores]
        last = next(each for each in reversed(cores) if each is not None)
        text = f"CPU  {strip(shares)} {rate(last)} of {rate(most)} cores"
        rows.append(Text(text, style="cyan"))
    return rows


def _memory(result: WatchResult) -> Text:
    books = result.ledger
    assert books is not None
    point = books.points[-1]
    held = [(name, getattr(point, name)) for name in ("allocated", "cached", "beyond", "others")]
    text = ", ".join(f"{size(value)} {name}" for name, value in held if value)
    free = f", {size(point.free)} free" if point.free is not None else ""
    return Text(f"Memory  {text}{free}")
