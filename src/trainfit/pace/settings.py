"""Changes system settings so that they can always be restored, and describes those there are."""

from __future__ import annotations

import contextlib
import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from trainfit.hardware.machine.parsing import cpu_list_text
from trainfit.results.files.errors import TrainfitError
from trainfit.results.files.writing import state_folder
from trainfit.results.machine import Machine
from trainfit.results.text import duration

_FORMAT: Final = "trainfit-pace-undo"
_BOOT: Final = "proc/sys/kernel/random/boot_id"


class SettingsError(TrainfitError):
    """A setting that cannot be changed, or brought back."""


def state_file(environment: Mapping[str, str]) -> Path:
    """The file in which former settings are kept."""
    return state_folder(environment) / "pace-undo.json"


class SystemSettings:
    """Files below ``root`` that are changed and brought back; ``state`` keeps what they held."""

    def __init__(self, root: Path = Path("/"), state: Path | None = None) -> None:
        self._root = root
        self.state = state if state is not None else state_file(os.environ)

    def change(self, wanted: Mapping[str, str]) -> None:
        """Write each value to its file (absolute path); all of them, or none.

        Raises :class:`SettingsError` with the file and the remedy.
        """
        kept = self._kept()
        former = {path: self._read(path) for path in wanted}
        self._keep({**former, **kept})  # what was there before all of ours
        written: list[str] = []
        try:
            for path, value in wanted.items():
                if former[path] != value:
                    self._write(path, value)
                    written.append(path)
        except BaseException:
            for path in reversed(written):
                with contextlib.suppress(SettingsError):
                    self._write(path, former[path])
            if kept:
                self._keep(kept)
            else:
                self.state.unlink(missing_ok=True)
            raise

    def undo(self) -> dict[str, str]:
        """Bring everything back; what was brought back, by file. Nothing, if nothing was changed
        since the system started.

        Raises :class:`SettingsError`; the state file stays then.
        """
        kept = self._kept()
        back = {}
        for path, value in kept.items():
            if self._read(path) != value:
                self._write(path, value)
                back[path] = value
        self.state.unlink(missing_ok=True)
        return back

    # --- The state file -------------------------------------------------------------------------
    def _kept(self) -> dict[str, str]:
        """What files held before, of this boot."""
        try:
            document: Any = json.loads(self.state.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            raise SettingsError(
                f"{str(self.state)!r} cannot be read ({error}): it holds the settings to "
                "restore; check it, and remove it if they are correct"
            ) from None
        if not isinstance(document, dict) or document.get("format") != _FORMAT:
            raise SettingsError(f"{str(self.state)!r} is not a trainfit file; move it elsewhere")
        if document.get("boot") != self._boot():
            return {}
        files = document.get("files")
        good = isinstance(files, dict) and all(
            isinstance(each, str) for pair in files.items() for each in pair
        )
        if not isinstance(files, dict) or not good:
            raise SettingsError(f"{str(self.state)!r} is damaged; set the governor by hand")
        return dict(files)

    def _keep(self, files: Mapping[str, str]) -> None:
        document = {"format": _FORMAT, "version": 1, "boot": self._boot(), "files": files}
        try:
            self.state.parent.mkdir(parents=True, exist_ok=True)
            scratch = self.state.with_name(self.state.name + ".part")
            with scratch.open("w", encoding="utf-8") as file:
                json.dump(document, file, indent=2)
                file.flush()
                os.fsync(file.fileno())  # a crash may take the system with it
            scratch.replace(self.state)
        except OSError as error:
            raise SettingsError(
                f"{str(self.state)!r} cannot be written ({error.strerror}): nothing is changed "
                "without it; set XDG_STATE_HOME to another folder"
            ) from None

    def _boot(self) -> str:
        with contextlib.suppress(OSError):
            return (self._root / _BOOT).read_text().strip()
        return ""

    # --- The settings ---------------------------------------------------------------------------
    def _read(self, path: str) -> str:
        try:
            return (self._root / path.lstrip("/")).read_text().strip()
        except OSError as error:
            raise SettingsError(f"{path} cannot be read: {error.strerror}") from None

    def _write(self, path: str, value: str) -> None:
        try:
            (self._root / path.lstrip("/")).write_text(value)
        except PermissionError:
            raise SettingsError(
                f"{path} cannot be written by this user: run trainfit with sudo, or "
                f"`echo {value} | sudo tee {path}`"
            ) from None
        except OSError as error:
            raise SettingsError(f"{path} rejects {value!r}: {error.strerror}") from None


# ---
# Disables deep idle states for as long as a process wants (Linux's PM QoS).
#
# ``/dev/cpu_dma_latency`` takes a 32-bit number of microseconds: no CPU enters an idle state that
# takes longer to leave, as long as the file is open; the least of all holders wins (kernel,
# Documentation/power/pm_qos_interface.rst). Closing it, or dying, ends it: nothing is to be undone.


DEVICE = "/dev/cpu_dma_latency"


class held_awake:
    """A context in which CPUs wake at once. Raises ``OSError`` where that is not allowed."""

    def __init__(self, root: Path = Path("/"), microseconds: int = 0) -> None:
        self._path = root / DEVICE.lstrip("/")
        self._microseconds = microseconds
        self._file: int | None = None

    def why_not(self) -> str:
        """Why it cannot be held, with the remedy; "" if it can."""
        if not self._path.exists():
            return (
                f"there is no {DEVICE}: the kernel has no CPU idle states to disable, "
                "or this is a container (give it --device /dev/cpu_dma_latency)"
            )
        if not os.access(self._path, os.W_OK):
            return (
                f"{DEVICE} cannot be written by this user; run as root, or "
                f"`sudo setfacl -m u:$USER:rw {DEVICE}` until the next boot"
            )
        return ""

    def __enter__(self) -> None:
        self._file = os.open(self._path, os.O_WRONLY)
        os.write(self._file, struct.pack("=i", self._microseconds))

    def __exit__(self, *_: object) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


# ---
# Clock and idle-state settings of this machine as text, stored with a measurement.


def power_facts(machine: Machine) -> dict[str, str]:
    """Facts by subject: cpufreq, scaling mode, turbo, idle states, P-cores, virtual machine. What
    is not visible here is said to be."""
    cpu = machine.cpu
    facts = {"cpufreq": _policies(machine)}
    if cpu.scaling_mode.value is not None:
        facts["scaling mode"] = cpu.scaling_mode.value
    if cpu.turbo.value is not None:
        facts["turbo"] = "on" if cpu.turbo.value else "off"
    states = cpu.idle_states.value
    if states is not None:
        facts["idle states"] = ", ".join(
            f"{state.name} ({duration(state.latency_s)})" + (" off" if state.disabled else "")
            for state in states
        )
    else:
        facts["idle states"] = f"not visible: {cpu.idle_states.reason}"
    fast = [kind for kind in cpu.core_kinds.value or () if kind.kind == "performance"]
    if fast:
        facts["performance cores"] = cpu_list_text(fast[0].logical_cpus)
    virtual = machine.surroundings.virtual_machine.value
    if virtual is not None:
        facts["virtual machine"] = str(virtual)
    return facts


def _policies(machine: Machine) -> str:
    policies = machine.cpu.policies
    if policies.value is None:
        return f"not visible: {policies.reason}"
    words = {
        f"{each.driver or 'unknown driver'} {each.governor or 'no governor'}"
        + (f", EPP {each.energy_preference}" if each.energy_preference else "")
        for each in policies.value
    }
    return "; ".join(sorted(words))
