"""A page as one HTML file that needs nothing else, or as Markdown; a chart as SVG.

Charts are drawn in the browser by Vega-Lite, whose code (from the package ``vl-convert-python``) is
within the file. Its Content-Security-Policy lets two scripts run, by their hashes, and forbids
every request.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib.metadata
import itertools
import json
import os
import re
from html import escape as html_escape
from importlib import resources
from pathlib import Path
from typing import Any, Final

from trainfit.report.blocks import (
    Block,
    Chart,
    Command,
    Facts,
    Headline,
    Item,
    Items,
    Output,
    Page,
    Section,
    Table,
    Text,
)
from trainfit.report.charts import standalone
from trainfit.results.files.errors import TrainfitError
from trainfit.results.text import printable
from trainfit.version import __version__

_NEEDED: Final = "pip install 'trainfit[report]'"
#: The end of a sentence, which is not that of a number or of an abbreviation before a figure.
_SENTENCE: Final = re.compile(r"(?<=[.!?]) (?=[A-Z])")


class ReportError(TrainfitError):
    """A page that cannot be made; the message says what is missing."""


def html(page: Page) -> str:
    """The whole document."""
    try:
        from jinja2 import Environment
        from markupsafe import Markup
    except ImportError as error:
        raise _missing("jinja2") from error
    charts = page.charts
    library = _safe_script(_library()) if charts else ""
    script = _asset("page.js")
    environment = Environment(autoescape=True, finalize=_shown, trim_blocks=True)
    template = environment.from_string(_asset("page.html"))
    return template.render(
        page=page,
        policy=_policy(*([library] if charts else []), script),
        style=Markup(_asset("page.css")),
        script=Markup(script),
        library=Markup(library),
        charts=Markup(_data([chart.spec for chart in charts])),
        numbers=_Places(charts),
        kind_of=lambda block: type(block).__name__,
        sentences=_sentences,
        together=_together,
    )


def framed(page: Page) -> str:
    """The document within a frame, for a notebook: nothing of it reaches the notebook's page."""
    return (
        f'<iframe srcdoc="{html_escape(html(page))}" sandbox="allow-scripts" '
        'title="trainfit report" style="width:100%;height:760px;border:0"></iframe>'
    )


def svg(chart: Chart) -> str:
    """One chart as a picture that stands alone."""
    try:
        import vl_convert
    except ImportError as error:
        raise _missing("vl-convert-python") from error
    spec = _printable(standalone(chart.spec))
    is_vega = "vega-lite" not in spec["$schema"]
    draw = vl_convert.vega_to_svg if is_vega else vl_convert.vegalite_to_svg
    drawn: str = draw(json.dumps(spec))
    # Says who made it, as the page's generator does: such a file may be replaced.
    return drawn.replace(">", f"><!-- trainfit {__version__} -->", 1)


class _Places:
    """Numbers of charts, which hold dictionaries and thus have no hash."""

    def __init__(self, charts: tuple[Chart, ...]) -> None:
        self._numbers = {id(chart): number for number, chart in enumerate(charts)}

    def __getitem__(self, chart: Chart) -> int:
        return self._numbers[id(chart)]


def _missing(package: str) -> ReportError:
    return ReportError(f"a report needs {package}, which is not installed; install it: {_NEEDED}")


def _shown(value: Any) -> Any:
    """Text of users without control characters; markup of ours as it is."""
    if type(value) is str:
        return printable(value, lines=True)
    return value


def _sentences(text: str) -> tuple[str, str]:
    """The first sentence, and the others."""
    parts = _SENTENCE.split(text, 1)
    return parts[0], parts[1] if len(parts) > 1 else ""


def _together(rows: tuple[tuple[str, str], ...]) -> list[tuple[str, list[str]]]:
    """Texts in a row that have one label."""
    return [
        (label, [text for _, text in group])
        for label, group in itertools.groupby((row for row in rows if row[1]), lambda row: row[0])
    ]


def _policy(*scripts: str) -> str:
    """Nothing is loaded; these scripts run, and no other."""
    hashes = " ".join(
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in scripts
    )
    return (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _data(specs: list[Any]) -> str:
    """JSON that no HTML parser takes for markup."""
    text = json.dumps(_printable(specs), separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _printable(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, dict):
        return {key: _printable(each) for key, each in value.items()}
    return [_printable(each) for each in value] if isinstance(value, list | tuple) else value


def _asset(name: str) -> str:
    return (resources.files(__package__) / "assets" / name).read_text(encoding="utf-8")


@functools.cache
def _library() -> str:
    """Vega-Lite's code, which takes seconds to bundle: kept in the user's cache."""
    try:
        import vl_convert
    except ImportError as error:
        raise _missing("vl-convert-python") from error
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    kept = Path(home) / "trainfit" / f"vega-{importlib.metadata.version('vl-convert-python')}.js"
    with contextlib.suppress(OSError):
        return kept.read_text(encoding="utf-8")
    code: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    with contextlib.suppress(OSError):
        kept.parent.mkdir(parents=True, exist_ok=True)
        scratch = kept.with_suffix(f".{os.getpid()}.part")
        scratch.write_text(code, encoding="utf-8")
        scratch.replace(kept)
    return code


def _safe_script(code: str) -> str:
    """Within a function of its own, and without what would end or comment out the element."""
    code = code.replace("</script", "<\\/script").replace("<!--", "<\\!--")
    return f"(()=>{{{code}\n}})();"


# ---
# A page as Markdown: the same sections as text and tables, a chart as its table.


#: Characters that mean something in Markdown, and those that begin a tag or an entity of HTML.
_SPECIAL: Final = re.compile(r"([\\`*_\[\]<>&#|~])")
_TICKS: Final = re.compile(r"`+")


def markdown(page: Page) -> str:
    """The whole document."""
    parts = [_text(f"# {_plain(page.title)}")]
    parts += [_headline(head) for head in page.headlines]
    parts += [_section(section) for section in page.sections]
    sources = ", ".join(f"{_code(name)} ({kind})" for name, kind in page.sources)
    parts.append(f"trainfit {page.version}; made from {sources}.")
    return "\n\n".join(part for part in parts if part) + "\n"


def _headline(head: Headline) -> str:
    parts = [f"## {_plain(head.kind)}: {_plain(head.text)}"]
    parts += [_plain(text) for text in (head.subject, head.limit) if text]
    parts += [_block(command) for command in head.commands]
    parts += ["\n".join(f"- {_plain(change)}" for change in head.changes)]
    tiles = [
        f"- {_plain(tile.label)}: **{_plain(tile.value)}**"
        + (f" ({_plain(tile.detail)})" if tile.detail else "")
        for tile in head.tiles
    ]
    return "\n\n".join(part for part in (*parts, "\n".join(tiles)) if part)


def _section(section: Section) -> str:
    parts = [f"## {_plain(section.title)}", _plain(section.answer)]
    return "\n\n".join(part for part in (*parts, *map(_block, section.blocks)) if part)


@functools.singledispatch
def _block(block: Block) -> str:
    raise TypeError(type(block).__name__)


@_block.register
def _command(block: Command) -> str:
    label = f"{_plain(block.label)}:\n\n" if block.label else ""
    return label + _fenced(block.text)


@_block.register
def _paragraph(block: Text) -> str:
    return _plain(block.text)


@_block.register
def _output(block: Output) -> str:
    return _fenced(block.text)


@_block.register
def _facts(block: Facts) -> str:
    return "\n".join(f"- {_plain(label)}: {_plain(text)}" for label, text in block.rows)


@_block.register
def _table(block: Table) -> str:
    align = ["---:" if n in block.numeric else "---" for n in range(len(block.columns))]
    rows = [
        [f"**{cell}**" if n in block.marked and cell else cell for cell in map(_plain, row)]
        for n, row in enumerate(block.rows)
    ]
    lines = [list(map(_plain, block.columns)), align, *rows]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return f"{_plain(block.caption)}\n\n{text}" if block.caption else text


@_block.register
def _chart(block: Chart) -> str:
    parts = [f"### {_plain(block.title)}", _plain(block.says), _table(block.table)]
    return "\n\n".join(part for part in (*parts, _plain(block.note)) if part)


@_block.register
def _items(block: Items) -> str:
    return "\n".join(map(_item, block.items))


def _item(each: Item) -> str:
    tag = f" ({_plain(each.tag)})" if each.tag else ""
    lines = [f"- **{_plain(each.title)}**{tag}"]
    lines += [f"  - {_plain(label)}: {_plain(text)}" for label, text in each.rows if text]
    lines += [f"  - {_plain(each.label)}: {_code(each.text)}" for each in each.commands]
    return "\n".join(lines)


def _plain(text: str) -> str:
    """On one line, and nothing in it means something to Markdown or HTML."""
    return _SPECIAL.sub(r"\\\1", _text(" ".join(text.split())))


def _text(text: str) -> str:
    return printable(text)


def _code(text: str) -> str:
    """A code span that no backtick in it ends; on one line."""
    line = printable(" ".join(text.split()))
    ticks = "`" * (_longest(line) + 1)
    pad = " " if line.startswith("`") or line.endswith("`") else ""
    return f"{ticks}{pad}{line}{pad}{ticks}"


def _fenced(text: str) -> str:
    fence = "`" * max(3, _longest(text) + 1)
    return f"{fence}\n{printable(text.rstrip(), lines=True)}\n{fence}"


def _longest(text: str) -> int:
    return max(map(len, _TICKS.findall(text)), default=0)
