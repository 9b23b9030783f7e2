"""The fixes of ``--fix``, each with its undo and its cost."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

from trainfit.pace.machine.latency import held_awake
from trainfit.pace.machine.settings import Settings
from trainfit.results.machine.pace import Fix

_POLICIES: Final = "sys/devices/system/cpu/cpufreq"
_GOVERNOR, _PREFERENCE = "scaling_governor", "energy_performance_preference"


@dataclasses.dataclass(frozen=True)
class FixText:
    """A fix as text."""

    what: str
    undo: str
    cost: str


FIX_TEXTS: Final[Mapping[Fix, FixText]] = {
    "spin": FixText(
        "sleep, then busy-wait for the last part of each pause (trainfit.pace.Pacer)",
        "wait with time.sleep",
        "that share of a core's time and power",
    ),
    "qos": FixText(
        "deep idle states are disabled while a process holds /dev/cpu_dma_latency open",
        "none needed: it ends when the process closes the file or exits",
        "more power and heat of all cores meanwhile",
    ),
    "governor": FixText(
        "governor performance on all CPUs",
        "trainfit pace --undo",
        "more power and heat, also while idle, until the next reboot",
    ),
}


class Fixer:
    """Applies fixes on this machine, its files below ``root``."""

    def __init__(self, root: Path = Path("/"), settings: Settings | None = None) -> None:
        self._root = root
        self._settings = settings or Settings(root)

    def why_not(self, fix: Fix) -> str:
        """Why a fix cannot be tried here, with the remedy; "" if it can."""
        if fix == "qos":
            return held_awake(self._root).why_not()
        return self._why_no_governor() if fix == "governor" else ""

    def _why_no_governor(self) -> str:
        governors = self._governors()
        if not governors:
            return (
                "there is no cpufreq policy in /sys/devices/system/cpu/cpufreq: in a virtual "
                "machine or without a cpufreq driver this system cannot set the clock"
            )
        if not os.access(self._root / governors[0].lstrip("/"), os.W_OK):
            return f"{governors[0]} cannot be written by this user: run trainfit with sudo"
        return ""

    @contextlib.contextmanager
    def applied(self, fix: Fix) -> Iterator[None]:
        """Applies the fix within, as far as the system is concerned; raises
        :class:`trainfit.pace.machine.settings.SettingsError` where that is not allowed."""
        if fix != "governor":
            yield
            return
        self.apply(fix)
        try:
            yield
        finally:
            self._settings.undo()

    def apply(self, fix: Fix) -> None:
        """Put it into effect for good, as far as it is the system's."""
        if fix == "governor":
            self._settings.change(self._wanted())

    def _wanted(self) -> dict[str, str]:
        """All files that performance changes: under it, drivers set the preference themselves.
        Governors come first: going back, a preference is only taken once its governor is."""
        governors, preferences = self._governors(), {}
        for path in governors:
            preference = path.replace(_GOVERNOR, _PREFERENCE)
            file = self._root / preference.lstrip("/")
            if file.is_file():
                preferences[preference] = file.read_text().strip()
        return {**dict.fromkeys(governors, "performance"), **preferences}

    def _governors(self) -> list[str]:
        folder = self._root / _POLICIES
        found = sorted(folder.glob(f"policy*/{_GOVERNOR}"), key=lambda path: (len(str(path)), path))
        return ["/" + str(path.relative_to(self._root)) for path in found]
