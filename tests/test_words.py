"""Texts that a user reads are in the field's standard terms (docs/glossary.md).

The words on the left of :data:`TERMS` are this project's former English. They may not come back in
string literals of the package (docstrings apart), in help texts, or on the pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from trainfit.cli.parser import VERBS, OptionParser

ROOT: Final = Path(__file__).resolve().parents[1]
SOURCE: Final = ROOT / "src" / "trainfit"

#: A pattern of former words, and the standard term to write instead.
TERMS: Final[dict[str, str]] = {
    r"\bcur(?:e|es|ed|ing)\b": "fix",
    r"\boffer(?:s|ed|ing)?\b": "has; of GPUs: GPU comparison, price",
    r"\bproducts?\b": "matmul (GEMM)",
    r"\bbesides?\b": "in addition, next to, compared with; or delete",
    r"\banew\b": "re-run, repeat; from scratch",
    r"\b(?:mak|show|render|record|measur|calibrat|plan|run|simulat)\w* (?:\w+ ){0,3}again\b": (
        "re-run, re-create, re-record, repeat"
    ),
    r"\bnine of ten\b": "90% prediction interval",
    r"\bhow sure\b": "confidence, prediction interval",
    r"\bcannot be:": "infeasible: needs X, Y available",
    r"(?<!there )\bis no (?:(?:whole )?number\b|$)": "expected a positive integer, got",
    r"\bthe present (?:batch|one|settings|value|step)|\bpresent values?\b": "current",
    r"\bh[eo]ld\w* (?:\w+ ){0,5}down\b": "limit, lower",
    r"\bthe other way round\b": "the opposite setting; vice versa",
    r"\b(?:was|were) asked for\b": "requested",
    r"\bsynchronis": "synchroniz",
    r"\bon the machine ends\b": "reboots; terminates all running jobs",
    r"\basleep\b|\bat work\b": "sleep; busy, busy-wait; under load",
    r"\bmend(?:s|ed|ing)?\b": "fix",
    r"\bbatch(?: size)? (?:that )?is enough\b|\benough batch": "saturation batch size",
    r"\bt(?:ake|akes|aken|aking|ook) (?:\w+ )?over\b|\bhand(?:ed|ing)?[ -]over\b": "transfer",
    r"\btakes\b(?! effect| precedence)": "uses, needs, costs",
    r"\blaunches as by\b": "assumed CPU: 3 GHz",
    r"\bmade to measure\b": "custom GPU specification",
    r"\bnoise scale \?": "leave the row out",
}

#: Places where such a word is the right one: the file, the text around it, and the reason.
ALLOWED: Final[tuple[tuple[str, str, str], ...]] = (
    ("docs/decisions/0020-the-loaders-queues-are-simulated.md", "product form",
     "queueing theory's term for a closed solution"),
    ("src/trainfit/simgpu/communication/collectives.py", "PRODUCT",
     "torch.distributed.ReduceOp.PRODUCT"),
)  # fmt: skip

#: Pages that benches write from data, with quotations of articles and of earlier results.
GENERATED: Final = frozenset({"docs/seeds.md", "docs/compatibility.md"})
PAGES: Final = sorted(
    {
        ROOT / "README.md",
        ROOT / "CONTRIBUTING.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    }
    - {ROOT / page for page in GENERATED}
)
PACKAGES: Final = sorted(path.name for path in SOURCE.iterdir() if (path / "__init__.py").is_file())


#: Most texts have none: one look instead of one for each.
ANY_TERM: Final = re.compile("|".join(f"(?:{pattern})" for pattern in TERMS), re.IGNORECASE)


class Text(NamedTuple):
    """A text with its file (from the repository's root) and line."""

    file: str
    line: int
    text: str


def hits(texts: Iterator[Text]) -> list[str]:
    """Where a former word stands, with the term to write instead."""
    found = []
    for place in texts:
        if not ANY_TERM.search(place.text):
            continue
        for pattern, standard in TERMS.items():
            for match in re.finditer(pattern, place.text, re.IGNORECASE):
                around = place.text[max(0, match.start() - 40) : match.end() + 40]
                if not any(f == place.file and part in around for f, part, _ in ALLOWED):
                    found.append(f"{place.file}:{place.line}: …{around}… (write: {standard})")
    return found


def literals(file: Path) -> Iterator[Text]:
    """String literals of a module that are no docstrings; of an f-string its constant parts."""
    nodes = list(ast.walk(ast.parse(file.read_text())))
    bodies = [node.body for node in nodes if isinstance(getattr(node, "body", None), list)]
    docstrings = {
        id(statement.value)
        for body in bodies
        for statement in body
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
    }
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in docstrings:
            yield Text(str(file.relative_to(ROOT)), node.lineno, node.value)


def paragraphs(page: Path) -> Iterator[Text]:
    """A page by paragraphs, without code spans and the targets of links, which hold names."""
    line = 1
    for block in re.split(r"(\n\s*\n)", page.read_text()):
        text = re.sub(r"`[^`\n]*`|\]\([^)]*\)", " ", " ".join(block.split()))
        yield Text(str(page.relative_to(ROOT)), line, text)
        line += block.count("\n")


@pytest.mark.parametrize("package", PACKAGES)
def test_messages_of_a_package_are_in_standard_terms(package: str) -> None:
    files = sorted((SOURCE / package).rglob("*.py"))
    found = [hit for file in files for hit in hits(literals(file))]
    assert not found, "\n".join(found)


def test_messages_of_the_top_modules_are_in_standard_terms() -> None:
    found = [hit for file in sorted(SOURCE.glob("*.py")) for hit in hits(literals(file))]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_a_command_is_in_standard_terms(verb: str) -> None:
    text = " ".join([VERBS[verb].purpose, *OptionParser(VERBS[verb]).format_help().split()])
    found = hits(iter([Text(f"trainfit {verb} --help", 1, text)]))
    assert not found, "\n".join(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_is_in_standard_terms(page: Path) -> None:
    found = hits(paragraphs(page))
    assert not found, "\n".join(found)


def test_every_exception_is_still_needed() -> None:
    """An entry of :data:`ALLOWED` whose text is gone is dropped."""
    for file, part, reason in ALLOWED:
        assert reason
        assert part in " ".join((ROOT / file).read_text().split()), f"{file}: {part}"


def test_the_check_finds_what_it_is_for(tmp_path: Path) -> None:
    texts = {
        "what cures it": "fix",
        "the knee takes 3 GiB": "uses",
        "make it again": "re-run",
        "show a result file again": "re-run",
        "asleep, at work at last": "busy-wait",
        "16-bit products": "matmul",
        "'x' is no whole number from 1 on": "expected",
    }
    for text, standard in texts.items():
        assert any(standard in hit for hit in hits(iter([Text("a.py", 1, text)]))), text
    fine = "scaled_dot_product_attention uses 3 GiB; log in again; takes effect; secure, obscure"
    assert not hits(iter([Text("a.py", 1, fine)]))
    module = ROOT / "tests" / "test_words.py"
    assert "fix" in {text.text for text in literals(module)}
    assert __doc__ not in {text.text for text in literals(module)}


def test_the_glossary_has_a_line_for_each_term_and_the_readme_names_it() -> None:
    glossary = (ROOT / "docs" / "glossary.md").read_text()
    terms = re.findall(r"^\| ([^|]+) \| [^|]+ \|$", glossary, re.MULTILINE)[1:]
    assert terms == sorted(terms, key=str.lower) and len(set(terms)) == len(terms) > 30
    for term in ("fix", "matmul", "prediction interval", "saturation batch size", "infeasible"):
        assert re.search(rf"^\| (?:[^|]*, )?{term}(?:,[^|]*)? \|", glossary, re.MULTILINE), term
    assert "docs/glossary.md" in (ROOT / "README.md").read_text()
