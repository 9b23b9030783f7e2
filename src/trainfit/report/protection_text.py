"""Notes on the files that a script wrote in a simulated run."""

from __future__ import annotations

from trainfit.results.format import count, size
from trainfit.results.runs.sandbox import Protection


def protection_notes(protection: Protection | None) -> list[str]:
    """Lines for the notes: none where the script wrote nothing and everything was protected."""
    if protection is None:
        return []
    return [*_kind(protection), *protection.notes]


def _kind(protection: Protection) -> list[str]:
    if protection.kind == "none":
        return ["the script's files were not protected (--allow-writes)"]
    parts = [_dropped(protection)] if protection.files or protection.removed else []
    if protection.kind == "redirection":
        how = "Python's file calls were redirected to a scratch layer"
        how += ", and Landlock refused other writes" if protection.guarded else ""
        parts.append(f"{how} ({protection.detail})" if protection.detail else how)
        if not protection.guarded:
            parts.append("files that C code writes by itself were not protected")
    elif protection.detail:
        parts.append(protection.detail)
    return ["; ".join(parts)] if parts else []


def _dropped(protection: Protection) -> str:
    wrote = f"the script wrote {count(protection.files, 'file')} ({size(protection.bytes)})"
    if protection.removed:
        wrote += f" and removed {protection.removed}" if protection.files else ""
    if not protection.files:
        wrote = f"the script removed {count(protection.removed, 'file')}"
    return f"{wrote} in a scratch layer: your files were not changed"
