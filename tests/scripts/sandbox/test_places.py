"""Which folders an overlay has to cover."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.hardware.machine.storage import Mount, _mount, read_mounts
from trainfit.hardware.machine.system import System
from trainfit.report.notes import protection_notes
from trainfit.results.runs.script import Protection
from trainfit.scripts.sandbox.layer import Layer, LayerContents, is_in_layer, written
from trainfit.scripts.sandbox.mounts import places


def mount(point: str, filesystem: str = "ext4") -> Mount:
    return Mount("8:1", "/", point, filesystem, "/dev/sda1", ())


def folders(root: Path, *names: str) -> str:
    for name in names:
        (root / name).mkdir(parents=True)
    return str(root)


def test_a_mount_is_covered_as_a_whole(tmp_path: Path) -> None:
    root = folders(tmp_path, "a/b", "c")
    found = places([mount(root)], ["/somewhere/else"], locked=False)
    assert (found.covered, found.kept, found.bare) == ((root,), (), ())


def test_the_folder_of_all_layers_is_taken_apart(tmp_path: Path) -> None:
    root = folders(tmp_path, "a/b", "layer", "c")
    found = places([mount(root)], [f"{root}/layer"], locked=False)
    assert found.covered == (f"{root}/a", f"{root}/c")
    assert found.bare == (root,)
    elsewhere = places([mount(root)], [f"{root}/layer", "/else"], locked=False)
    assert elsewhere.covered == (root,)


def test_mounts_below(tmp_path: Path) -> None:
    """As root they are covered after what they are in; in a user namespace the kernel lets
    nobody cover what has locked mounts below it."""
    root = folders(tmp_path, "home/me/data", "home/you", "opt")
    mounts = [mount(root), mount(f"{root}/home/me/data")]
    free = places(mounts, ["/else"], locked=False)
    assert free.covered == (root, f"{root}/home/me/data") and not free.bare
    locked = places(mounts, ["/else"], locked=True)
    for path in (f"{root}/opt", f"{root}/home/you", f"{root}/home/me/data"):
        assert path in locked.covered
    assert root not in locked.covered and f"{root}/home/me" not in locked.covered
    assert locked.bare == (root,)


def test_what_holds_no_files_is_kept(tmp_path: Path) -> None:
    root = folders(tmp_path, "a/special")
    mounts = [mount(root), mount(f"{root}/a/special", "cgroup2"), mount("/proc", "proc")]
    found = places(mounts, ["/else"], locked=False)
    assert (found.covered, found.kept) == ((root,), (f"{root}/a/special",))


def test_devices_and_processes_are_as_they_are() -> None:
    mounts = read_mounts(System()).value
    if mounts is None:
        pytest.skip("no mounts to read here")
    found = places(mounts, ["/tmp/layer", "/var/tmp/layer"], locked=False)
    assert "/" not in found.covered
    for path in found.covered:
        assert not path.startswith(("/proc", "/sys")) and path != "/dev"


@given(st.text(st.characters(codec="utf-8", exclude_characters="\0\r")))
def test_a_cover_tells_what_it_covers(source: str) -> None:
    """Who asks what a file lies on (its storage) is told of the mount below the cover."""
    told = f"trainfit 259:2 xfs {source} /home/me"
    escaped = "".join(f"\\{ord(c):03o}" if c in " \t\n\\" else c for c in told)
    line = f"36 35 0:53 / /home/me rw,relatime - overlay {escaped} rw,lowerdir=/x"
    found = _mount(line)
    assert found is not None
    assert (found.device, found.filesystem, found.root) == ("259:2", "xfs", "/home/me")
    assert found.source == source


# -- layers ----------------------------------------------------------------------------------


def test_layers_of_killed_runs_are_swept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    left = tmp_path / "trainfit-layer-left"
    (left / "work").mkdir(parents=True)
    (left / "lock").touch()
    (left / "work").chmod(0)
    layer = Layer.make()
    assert not left.exists()
    other = Layer.make()
    for folder in (*layer.folders, *other.folders):
        assert folder.is_dir() and is_in_layer(str(folder))
    layer.drop()
    assert not any(folder.exists() for folder in layer.folders)
    assert all(folder.exists() for folder in other.folders)
    other.drop()


def test_later_layers_count_last(tmp_path: Path) -> None:
    one, two = tmp_path / "one" / "files", tmp_path / "two" / "files"
    for folder in (one, two):
        folder.mkdir(parents=True)
    (one / "a").write_text("12345")
    (one / "b").write_text("1")
    (one / "__pycache__").mkdir()
    (one / "__pycache__" / "a.pyc").write_text("bytecode")
    (two / "b").write_text("123")
    (tmp_path / "two" / "removed").mkdir()
    (tmp_path / "two" / "removed" / "a#removed").touch()
    pairs = [("/home", str(one)), ("/home", str(two))]
    assert written(pairs) == LayerContents({"/home/b": 3}, ("/home/a",))


# -- words -----------------------------------------------------------------------------------


def test_nothing_is_said_of_a_script_that_writes_nothing() -> None:
    assert protection_notes(None) == []
    assert protection_notes(Protection("overlay")) == []


def test_what_is_said() -> None:
    (line,) = protection_notes(Protection("overlay", files=2, bytes=3 << 20))
    assert "wrote 2 files (3 MiB)" in line and "your files were not changed" in line
    (line,) = protection_notes(Protection("overlay", removed=1))
    assert "removed 1 file in" in line
    (line,) = protection_notes(Protection("redirection", "no namespaces", guarded=False))
    assert "no namespaces" in line and "C code" in line
    assert protection_notes(Protection("none")) == [
        "the script's files were not protected (--allow-writes)"
    ]
    assert protection_notes(Protection("overlay", notes=("a daemon",))) == ["a daemon"]
