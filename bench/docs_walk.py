"""Type what README, Getting started and the guides tell their readers to, in a fresh clone.

Each command must end as the page says, and print the sample screens. With ``--write`` the samples
and the pictures are made from what is printed today: on a machine that is otherwise idle, in the
environment that `make test` makes. What is committed is walked, the pages are those of the folder.

    python bench/docs_walk.py                         # all pages
    python bench/docs_walk.py docs/guide/plan.md      # one, with what README's reader has
    python bench/docs_walk.py --write
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections import Counter
from pathlib import Path

from _walk import Walk, pages
from _walk_place import ROOT, CloneFolder, default_lent

PICTURES = Path("docs") / "pictures"


def main() -> int:
    """Walk; 0 if every command works and every sample is a true one."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pages", nargs="*", metavar="PAGE", help="default: all")
    parser.add_argument("--write", action="store_true", help="rewrite samples and pictures")
    parser.add_argument("--only", default="", metavar="PIECE", help="commands that contain it")
    parser.add_argument("--lend", type=Path, metavar="PYTHON", help="whose packages are lent")
    parser.add_argument("--keep", action="store_true", help="keep the clone and print where it is")
    options = parser.parse_args()
    unknown = sorted(set(options.pages) - set(pages()))
    if unknown:
        parser.error(f"{unknown[0]} is no page of a walk: {', '.join(pages())}")
    folder = Path(tempfile.mkdtemp(prefix="docs-walk-"))
    try:
        return walked(options, folder)
    finally:
        if options.keep:
            print(f"kept: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)


def walked(options: argparse.Namespace, folder: Path) -> int:
    """Walk in ``folder``, print each outcome as it comes, and write if that is wanted."""
    place = CloneFolder(folder, options.lend or default_lent())
    walk = Walk(place, wanted=lambda text: options.only in text, pictures=options.write)
    walk.prepare()
    counts: Counter[str] = Counter()
    drawn = False
    for page in options.pages or pages():
        for outcome in walk.page(page):
            counts[outcome.verdict] += 1
            drawn |= (outcome.kind, outcome.verdict) == ("picture", "ok")
            print(outcome.row, flush=True)
    if options.write:
        for name in walk.write():
            print(f"written: {name}")
        for file in sorted((place.clone / PICTURES).iterdir()) if drawn else ():
            shutil.copy2(file, ROOT / PICTURES / file.name)
    print(", ".join(f"{count} {verdict}" for verdict, count in sorted(counts.items())))
    return 1 if counts["failed"] or (counts["differs"] and not options.write) else 0


if __name__ == "__main__":
    sys.exit(main())
