"""The command ``trainfit``: finds the verb, turns errors into one line and an exit code.

Exit codes: 0 good, 1 bad news (does not fit), 2 bad input or a failed run.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from trainfit import __version__
from trainfit.cli import plan, show, simulate
from trainfit.hardware import GpuNameError
from trainfit.report.sizes import printable
from trainfit.results.errors import TrainfitError

_VERBS = {"plan": plan, "simulate": simulate, "show": show}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="trainfit", description="Fit a PyTorch job to the hardware it runs on."
    )
    parser.add_argument("--version", action="version", version=f"trainfit {__version__}")
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    for name, module in _VERBS.items():
        module.configure(verbs.add_parser(name, **module.PARSER))
    words = list(sys.argv[1:] if argv is None else argv)
    own, command = _split(words)
    options = parser.parse_args(own)
    try:
        return _VERBS[options.verb].run(options, command)
    except (TrainfitError, GpuNameError) as error:
        return _report(error)
    except KeyboardInterrupt:
        print("trainfit: interrupted", file=sys.stderr)
        return 130


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Our words, and the user's command: what follows ``--``, untouched."""
    if "--" in words:
        at = words.index("--")
        return words[:at], words[at + 1 :]
    return words, []


def _report(error: Exception) -> int:
    print(f"trainfit: error: {printable(str(error))}", file=sys.stderr)
    output = getattr(error, "script_output", "")
    if output:
        print("--- the script's own output ---", file=sys.stderr)
        print(printable(output.rstrip()), file=sys.stderr)
        print("--- end of the script's output ---", file=sys.stderr)
    return getattr(error, "exit_code", 2)


if __name__ == "__main__":
    sys.exit(main())
