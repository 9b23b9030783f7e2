"""Settings that are changed and brought back, whatever happens in between."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path

import pytest

from helpers_pace import cpufreq_tree
from trainfit.pace.fixes import Fixer
from trainfit.pace.settings import DEVICE, SettingsError, SystemSettings, held_awake, state_file

GOVERNOR = "/sys/devices/system/cpu/cpufreq/policy0/scaling_governor"
PREFERENCE = "/sys/devices/system/cpu/cpufreq/policy0/energy_performance_preference"


def governors(root: Path) -> list[str]:
    return [path.read_text().strip() for path in sorted(root.rglob("scaling_governor"))]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return cpufreq_tree(tmp_path / "root")


@pytest.fixture
def made(root: Path, tmp_path: Path) -> SystemSettings:
    return SystemSettings(root, tmp_path / "state" / "undo.json")


def test_the_governor_is_set_within_and_brought_back(root: Path, made: SystemSettings) -> None:
    fixer = Fixer(root, made)
    assert fixer.why_not("governor") == ""
    with fixer.applied("governor"):
        assert governors(root) == ["performance", "performance"]
        assert made.state.is_file()
    assert governors(root) == ["powersave", "powersave"]
    assert not made.state.exists()


def test_what_is_kept_is_undone_later_by_another_process(root: Path, made: SystemSettings) -> None:
    Fixer(root, made).apply("governor")
    # The driver sets its preference itself under this governor.
    (root / PREFERENCE.lstrip("/")).write_text("performance\n")
    again = SystemSettings(root, made.state)
    back = again.undo()
    assert back[GOVERNOR] == "powersave" and back[PREFERENCE] == "balance_performance"
    # A preference is only taken once its governor is back.
    assert list(back).index(GOVERNOR) < list(back).index(PREFERENCE)
    assert governors(root) == ["powersave", "powersave"]
    assert again.undo() == {}


def test_after_a_crash_the_first_settings_count(root: Path, made: SystemSettings) -> None:
    made.change({GOVERNOR: "performance"})
    SystemSettings(root, made.state).change({GOVERNOR: "schedutil"})  # a second run, after a crash
    assert made.undo() == {GOVERNOR: "powersave"}


def test_an_exception_within_brings_it_back(root: Path, made: SystemSettings) -> None:
    with pytest.raises(KeyboardInterrupt), Fixer(root, made).applied("governor"):
        raise KeyboardInterrupt
    assert governors(root) == ["powersave", "powersave"]


def test_settings_of_an_earlier_boot_are_forgotten(root: Path, made: SystemSettings) -> None:
    made.change({GOVERNOR: "performance"})
    (root / "proc/sys/kernel/random/boot_id").write_text("another\n")
    assert made.undo() == {}
    assert not made.state.exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write all files")
def test_no_right_to_write(root: Path, made: SystemSettings) -> None:
    (root / GOVERNOR.lstrip("/")).chmod(0o444)
    with pytest.raises(SettingsError, match=r"scaling_governor cannot be written .* sudo"):
        made.change({GOVERNOR: "performance"})
    assert not made.state.exists()


def test_all_or_none(root: Path, made: SystemSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    real = SystemSettings._write

    def write(self: SystemSettings, path: str, value: str) -> None:
        if "policy1" in path:
            raise SettingsError(f"{path} cannot be written by this user")
        real(self, path, value)

    monkeypatch.setattr(SystemSettings, "_write", write)
    with pytest.raises(SettingsError, match="policy1"):
        Fixer(root, made).apply("governor")
    assert governors(root) == ["powersave", "powersave"]
    assert not made.state.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "cannot be read"),
        ("[]", "is not a trainfit file"),
        ('{"format": "other"}', "is not a trainfit file"),
        (
            '{"format": "trainfit-pace-undo", "boot": "11111111-2222", "files": {"a": 1}}',
            "damaged",
        ),
    ],
)
def test_a_state_file_that_is_none(made: SystemSettings, text: str, words: str) -> None:
    made.state.parent.mkdir()
    made.state.write_text(text)
    with pytest.raises(SettingsError, match=words):
        made.undo()
    assert made.state.exists()


def test_without_a_state_file_nothing_is_changed(root: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(SettingsError, match="nothing is changed without it"):
        SystemSettings(root, blocked / "state" / "undo.json").change({GOVERNOR: "performance"})
    assert governors(root)[0] == "powersave"


def test_a_machine_without_policies(tmp_path: Path) -> None:
    assert "no cpufreq policy" in Fixer(tmp_path).why_not("governor")


def test_where_the_state_is_kept(tmp_path: Path) -> None:
    assert state_file({"XDG_STATE_HOME": str(tmp_path)}) == tmp_path / "trainfit/pace-undo.json"
    assert state_file({}).name == "pace-undo.json"


def test_the_state_file_is_data(root: Path, made: SystemSettings) -> None:
    made.change({GOVERNOR: "performance"})
    document = json.loads(made.state.read_text())
    assert document["files"] == {GOVERNOR: "powersave"} and document["version"] == 1


# --- Idle states ----------------------------------------------------------------------------------
def test_the_limit_is_held_while_the_file_is_open(tmp_path: Path) -> None:
    file = tmp_path / DEVICE.lstrip("/")
    file.parent.mkdir()
    file.write_bytes(b"")
    held = held_awake(tmp_path)
    assert held.why_not() == ""
    with held:
        assert struct.unpack("=i", file.read_bytes()) == (0,)
        assert held._file is not None
    assert held._file is None


def test_why_it_cannot_be_held(tmp_path: Path) -> None:
    assert "there is no /dev/cpu_dma_latency" in held_awake(tmp_path).why_not()
    assert "there is no /dev/cpu_dma_latency" in Fixer(tmp_path).why_not("qos")
    if os.geteuid():
        file = tmp_path / DEVICE.lstrip("/")
        file.parent.mkdir()
        file.touch(0o400)
        assert "cannot be written by this user" in held_awake(tmp_path).why_not()
