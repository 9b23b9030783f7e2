"""``--format``: a result as something else than a screen or its whole document."""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Final

from trainfit.cli.common import OptionGroup, UsageError

if TYPE_CHECKING:
    from trainfit.results.files.metrics import Metered

#: The forms of a launch line: :data:`trainfit.report.launch_script.LaunchForm`, which takes long to
#: import.
LAUNCH: Final = ("sh", "sbatch", "docker")
METRICS: Final = "metrics"
SARIF: Final = "sarif"


def add_format(group: OptionGroup, *others: str) -> None:
    """Add ``--format`` with the forms of a launch line, and ``others``."""
    also = {
        METRICS: "metrics: the numbers as one flat JSON object",
        SARIF: "sarif: what `trainfit doctor --script` found",
    }
    group.add_argument(
        "--format",
        choices=(*LAUNCH, *others),
        help="print instead a script that runs the launch line: in a shell, by Slurm's sbatch, by "
        "docker run" + "".join(f"; {also[each]}" for each in others),
    )


def formatted(result: Metered, options: argparse.Namespace) -> str | None:
    """As ``--format`` asks for it; ``None``: it does not.

    Raises :class:`UsageError` for what such a result has not,
    :class:`trainfit.report.launch_script.LaunchScriptError` where the job does not fit.
    """
    form = options.format
    if form is None:
        return None
    from trainfit.report.launch_script import launch_script
    from trainfit.report.machine.sarif import sarif_text
    from trainfit.results.machine.doctor import DoctorResult
    from trainfit.results.plan.result import PlanResult

    check_format(options)
    if form == METRICS:
        return json.dumps(result.metrics(), indent=2, allow_nan=False)
    if form == SARIF:
        if not isinstance(result, DoctorResult) or result.script is None:
            raise UsageError("--format sarif is for a result of `trainfit doctor --script`")
        return sarif_text(result.script)
    if not isinstance(result, PlanResult):
        raise UsageError(f"--format {form} is for a plan, which has a launch line")
    return launch_script(result, form).rstrip("\n")


def check_format(options: argparse.Namespace) -> None:
    """Raise :class:`UsageError` where two forms are asked for."""
    if options.format is not None and options.json:
        raise UsageError(f"--json and --format {options.format}: give one")
