"""Several results as one JSON document, each as its own file has it.

Format history
    1   first version
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from trainfit.results.files.errors import ResultFileError

FORMAT: Final = "trainfit-report"
VERSION: Final = 1
_REMAKE: Final = "re-create it with `trainfit report RESULT… -o FILE.json`"


def joined(parts: Sequence[tuple[str, str]]) -> str:
    """One document of ``parts``: the name of each file, and its JSON text."""
    results = [{"file": name, "result": json.loads(text)} for name, text in parts]
    document = {"format": FORMAT, "version": VERSION, "results": results}
    return json.dumps(document, indent=2, allow_nan=False)


def parted(text: str, path: Path) -> list[tuple[str, str]]:
    """The reverse of :func:`joined`; raises :class:`ResultFileError` for ``path``."""
    document: Any = json.loads(text)
    version = document.get("version")
    if type(version) is not int or not 1 <= version <= VERSION:
        reason = f"its format version is {version!r}, this trainfit reads up to {VERSION}"
        raise ResultFileError(path, reason, "upgrade trainfit, or re-create the file")
    try:
        return [(str(each["file"]), json.dumps(each["result"])) for each in document["results"]]
    except (KeyError, TypeError) as error:
        raise ResultFileError(path, f"it is damaged ({error!r})", _REMAKE) from error
