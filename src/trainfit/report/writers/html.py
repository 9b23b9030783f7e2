"""A page as one HTML file that needs nothing else; a chart as SVG.

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
from collections.abc import Sequence
from html import escape as html_escape
from importlib import resources
from pathlib import Path
from typing import Any, Final

from trainfit.report.blocks import Chart, Page, Row
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


def _together(rows: Sequence[tuple[str, str] | Row]) -> list[tuple[str, list[str]]]:
    """Texts in a row that have one label."""
    return [
        (label, [row[1] for row in group])
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
