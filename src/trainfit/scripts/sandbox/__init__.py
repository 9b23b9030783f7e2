"""Runs a user's script so that nothing of the user's is changed.

:func:`begin` is the entry: it protects the process in which a script is about to run. The
protections, the strongest first:

* ``overlay``: a layer over the whole file system takes what is written, by whatever means;
* ``redirection``: Python's file calls go to a layer, and Landlock refuses other writes.

Every run has a layer of its own, which is dropped at its end.
"""

from __future__ import annotations

from trainfit.scripts.sandbox.entry import begin
from trainfit.scripts.sandbox.layer import hint, note, stopped

__all__ = ["begin", "hint", "note", "stopped"]
