"""What a script does to files in a sandbox stays in its layer, and is true for the script."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from helpers_sandbox import run_protected, tree
from trainfit.results.runs.script import Protection, SandboxRequest

#: The protections by themselves; the first falls away where a container forbids it.
KINDS = ("overlay", "redirection")


@pytest.fixture(scope="module")
def overlay_works(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Empty, or why this kernel or container has no overlay for us."""
    folder = tmp_path_factory.mktemp("probe")
    ran = run_protected("", folder, folder / "s", SandboxRequest(kinds=("overlay",)))
    assert ran.protection is not None
    return ran.protection.detail if ran.protection.not_run else ""


@pytest.fixture(params=KINDS)
def request_of(request: pytest.FixtureRequest, overlay_works: str) -> SandboxRequest:
    if request.param == "overlay" and overlay_works:
        pytest.skip(overlay_works)
    return SandboxRequest(kinds=(request.param,))


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A user's folder: a working folder with an old run, and one next to it."""
    work = tmp_path / "home" / "work"
    (work / "runs" / "old").mkdir(parents=True)
    (work / "last.pt").write_bytes(b"the user's trained weights")
    (work / "runs" / "old" / "log.txt").write_text("line 1\n")
    (work / "read-only.txt").write_text("x")
    (work / "read-only.txt").chmod(0o444)
    other = tmp_path / "home" / "other"
    other.mkdir()
    (other / "data.bin").write_bytes(b"0123456789")
    (work / "out-of-it").symlink_to(other)
    (work / "data").symlink_to("../other/data.bin")
    old = time.time() - 1e6
    for path in (work / "last.pt", other / "data.bin"):
        os.utime(path, (old, old))
    return tmp_path / "home"


def check(code: str, home: Path, request: SandboxRequest) -> str:
    """The code ends well, and the user's folder is what it was; what it printed."""
    before = tree(home)
    ran = run_protected(code, home / "work", home.parent / "scratch", request)
    assert ran.code == 0, ran.output
    assert tree(home) == before
    assert ran.protection is not None and ran.protection.kind == request.kinds[0]
    assert not ran.protection.stopped
    return ran.output


def test_what_is_written_is_read_back(home: Path, request_of: SandboxRequest) -> None:
    check(
        f"""
        import os
        from pathlib import Path
        open("new.txt", "w").write("one")
        open("new.txt", "a").write(" two")
        assert open("new.txt").read() == "one two"
        open("runs/old/log.txt", "a").write("line 2")
        assert Path("runs/old/log.txt").read_text().split("\\n") == ["line 1", "line 2"]
        Path("{home}/other/data.bin").write_bytes(b"absolute")
        assert open("data", "rb").read() == b"absolute"  # the link shows it
        open("out-of-it/through-a-link", "w").write("x")
        assert os.path.isfile("{home}/other/through-a-link")
        os.makedirs("runs/new/deep", exist_ok=True)
        Path("runs/new/deep/file").touch()
        assert sorted(os.listdir("runs")) == ["new", "old"]
        assert [each.name for each in sorted(Path(".").rglob("file"))] == ["file"]
        with open("last.pt", "r+b") as stream:
            stream.seek(4)
            stream.write(b"USER")
        assert open("last.pt", "rb").read() == b"the USER's trained weights"
        os.symlink("last.pt", "newest")
        assert open("newest", "rb").read(8) == b"the USER" and os.readlink("newest") == "last.pt"
        os.chdir("runs/new")
        assert os.getcwd() == "{home}/work/runs/new" and os.path.exists("deep/file")
        """,
        home,
        request_of,
    )


def test_what_is_removed_and_replaced(home: Path, request_of: SandboxRequest) -> None:
    check(
        """
        import os, shutil
        open("part", "w").write("new weights")
        os.replace("part", "last.pt")
        assert open("last.pt").read() == "new weights" and not os.path.exists("part")
        shutil.rmtree("runs")
        assert not os.path.exists("runs") and not os.path.isfile("runs/old/log.txt")
        os.makedirs("runs/again")
        assert os.listdir("runs") == ["again"]
        os.rename("out-of-it", "moved")
        assert os.path.islink("moved") and not os.path.lexists("out-of-it")
        os.unlink("data")
        assert "data" not in os.listdir(".")
        assert "data" not in [each.name for each in os.scandir(".")]
        os.chmod("last.pt", 0o600)
        os.utime("last.pt", (1, 1))
        assert os.stat("last.pt").st_mtime == 1 and os.stat("last.pt").st_mode & 0o777 == 0o600
        os.truncate("last.pt", 3)
        assert os.path.getsize("last.pt") == 3
        try:
            open("missing/file", "w")
        except FileNotFoundError as error:
            assert error.filename == "missing/file", error.filename
        else:
            raise AssertionError
        """,
        home,
        request_of,
    )


def test_the_working_folder_itself(home: Path, request_of: SandboxRequest) -> None:
    check(
        """
        import os, shutil
        here = os.getcwd()
        os.chdir("..")
        shutil.rmtree(here)
        assert not os.path.exists(here) and os.listdir(".") == ["other"]
        """,
        home,
        request_of,
    )


@pytest.mark.slow
def test_checkpoints_by_libraries(home: Path, request_of: SandboxRequest) -> None:
    pytest.importorskip("h5py")
    pytest.importorskip("safetensors")
    check(
        """
        import sqlite3
        import h5py
        import numpy as np
        import torch
        from safetensors.torch import load_file, save_file
        torch.save({"w": torch.ones(3)}, "last.pt")
        assert torch.load("last.pt")["w"].sum() == 3
        torch.save([1], "legacy.pt", _use_new_zipfile_serialization=False)
        assert torch.load("legacy.pt") == [1]
        np.save("a.npy", np.ones(2))
        assert np.load("a.npy", mmap_mode="r").sum() == 2
        grid = np.memmap("grid", "float32", "w+", shape=4)
        grid[:] = 2
        grid.flush()
        assert np.memmap("grid", "float32", "r").sum() == 8
        for path in ("new.sqlite", "runs/old/log.sqlite"):
            base = sqlite3.connect(path)
            base.execute("create table t (x)")
            base.execute("insert into t values (7)")
            base.commit()
            base.close()
            assert sqlite3.connect(path).execute("select x from t").fetchall() == [(7,)]
        save_file({"w": torch.ones(2)}, "last.pt")  # by code in C, as what follows
        assert load_file("last.pt")["w"].sum() == 2
        with h5py.File("data.h5", "w") as stream:
            stream["x"] = [1, 2]
        with h5py.File("data.h5", "a") as stream:
            assert stream["x"][1] == 2
        """,
        home,
        request_of,
    )


def test_opencv(home: Path, request_of: SandboxRequest) -> None:
    pytest.importorskip("cv2")
    check(
        """
        import cv2, numpy
        assert cv2.imwrite("image.png", numpy.zeros((4, 4, 3), "uint8"))
        assert cv2.imread("image.png").shape == (4, 4, 3)
        """,
        home,
        request_of,
    )


def test_dataloader_workers_write(home: Path, request_of: SandboxRequest) -> None:
    check(
        """
        import os, torch
        from torch.utils.data import DataLoader, Dataset
        class Data(Dataset):
            def __len__(self):
                return 4
            def __getitem__(self, index):
                open(f"cache-{index}", "w").write(str(index))
                return torch.full((1000,), float(index))
        batches = list(DataLoader(Data(), batch_size=2, num_workers=2))
        assert batches[1].shape == (2, 1000)
        assert sorted(each for each in os.listdir(".") if each.startswith("cache")) == [
            f"cache-{index}" for index in range(4)
        ]
        """,
        home,
        request_of,
    )


def test_child_programs_write_to_the_overlay(home: Path, overlay_works: str) -> None:
    if overlay_works:
        pytest.skip(overlay_works)
    check(
        """
        import subprocess
        subprocess.run("touch by-touch; cp last.pt copy.pt; rm -r runs; echo x >> last.pt",
                       shell=True, check=True)
        assert open("copy.pt").read() == "the user's trained weights"
        assert open("last.pt").read().endswith("x\\n")
        """,
        home,
        SandboxRequest(kinds=("overlay",)),
    )


def test_child_programs_are_refused_without_an_overlay(home: Path) -> None:
    request = SandboxRequest(kinds=("redirection",))
    ran = run_protected("import os; print(os.getcwd())", home, home.parent / "s0", request)
    if ran.protection is None or not ran.protection.guarded:
        pytest.skip(f"no Landlock here: {ran.protection}")
    said = check(
        """
        import subprocess
        done = subprocess.run(["cp", "last.pt", "copy.pt"], capture_output=True, text=True)
        print(done.returncode, done.stderr)
        """,
        home,
        request,
    )
    assert said.startswith("1 ") and "copy.pt" in said and "Permission denied" in said


def test_a_daemon_is_ended(home: Path, request_of: SandboxRequest) -> None:
    said = check(
        """
        import os, time
        read, write = os.pipe()
        if os.fork() == 0:
            os.setsid()
            if os.fork() == 0:
                os.write(write, str(os.getpid()).encode())
                time.sleep(300)
            os._exit(0)
        print(os.read(read, 100).decode())
        """,
        home,
        request_of,
    )
    assert not Path("/proc", said.split()[0]).exists()


def test_services_are_reached(home: Path, request_of: SandboxRequest) -> None:
    """Through an overlay alone the kernel refuses the connection."""
    folder = Path(tempfile.mkdtemp(prefix="s-", dir="/tmp"))
    with socket.socket(socket.AF_UNIX) as service:
        service.bind(str(folder / "socket"))
        service.listen()
        code = f"""
        import socket
        socket.socket(socket.AF_UNIX).connect({str(folder / "socket")!r})
        """
        check(code, home, request_of)
    shutil.rmtree(folder)


def test_downloads_that_every_run_repeats_are_told(home: Path, request_of: SandboxRequest) -> None:
    (home / ".cache").mkdir()
    code = "open('../.cache/model', 'wb').truncate(60_000_000)"
    before = tree(home)
    ran = run_protected(code, home / "work", home.parent / "scratch", request_of)
    assert ran.protection is not None and tree(home) == before
    assert [note[:7] for note in ran.protection.notes] == ["0.06 GB"]


def test_too_much_is_stopped(home: Path, request_of: SandboxRequest) -> None:
    before = tree(home)
    request = SandboxRequest(kinds=request_of.kinds, limit_bytes=8_000_000)
    code = """
    import time
    from trainfit.scripts import sandbox
    with open("large", "wb") as stream:
        while not sandbox.stopped():
            stream.write(bytes(1_000_000))
            stream.flush()
            time.sleep(0.05)
    print(sandbox.stopped())
    """
    ran = run_protected(code, home / "work", home.parent / "scratch", request)
    assert ran.code == 0, ran.output
    assert ran.protection is not None
    assert "more than 0.008 GB" in ran.protection.stopped
    assert "--allow-writes" in ran.protection.stopped
    assert tree(home) == before


def test_what_is_kept(home: Path, request_of: SandboxRequest) -> None:
    kept = home.parent / "kept"
    request = SandboxRequest(kinds=request_of.kinds, keep=str(kept))
    code = "import os; open('new.txt', 'w').write('new'); os.remove('last.pt')"
    check(code, home, request)
    assert Path(f"{kept}{home}/work/new.txt").read_text() == "new"
    assert (kept / "REMOVED.txt").read_text().split() == [f"{home}/work/last.pt"]
    files = [each for each in kept.rglob("*") if each.is_file()]
    assert len(files) == 2, files


@pytest.mark.slow
def test_two_runs_at_once_do_not_meet(home: Path, request_of: SandboxRequest) -> None:
    before = tree(home)
    code = "import os, time; os.mkdir('run-of-this-second'); time.sleep(0.5)"
    command = (
        "from helpers_sandbox import run_protected; from pathlib import Path; import sys; "
        "from trainfit.results.runs.script import SandboxRequest; "
        f"ran = run_protected({code!r}, Path({str(home / 'work')!r}), Path(sys.argv[1]), "
        f"SandboxRequest(kinds={request_of.kinds!r})); sys.exit(ran.code)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    runs = [
        subprocess.Popen([sys.executable, "-c", command, str(home.parent / name)], env=environment)
        for name in ("one", "two")
    ]
    assert [each.wait(60) for each in runs] == [0, 0]
    assert tree(home) == before


def test_runs_that_are_forked_from_a_started_script(home: Path, request_of: SandboxRequest) -> None:
    """Each sees what the script had written before, over the original files, and writes to a
    layer of its own."""
    folders = [home.parent / f"trainfit-runs/{name}" for name in ("one", "two")]
    code = f"""
    import os
    from pathlib import Path
    from trainfit.scripts import sandbox
    open("by-script", "w").write("script")
    os.remove("data")
    os.mkdir("runs/new")
    children = []
    for folder in {list(map(str, folders))!r}:
        if (pid := os.fork()) == 0:
            sandbox.begin(Path(folder))
            assert os.getcwd() == {str(home / "work")!r}
            assert open("by-script").read() == "script" and not os.path.lexists("data")
            assert open("last.pt").read() == "the user's trained weights"
            os.mkdir("runs/new/of-this-second")
            open("by-script", "a").write(" and run")
            open("last.pt", "w").write("new")
            Path(folder, "outcome").write_text(open("by-script").read())
            os._exit(7)
        children.append(pid)
    assert [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children] == [7, 7]
    assert open("by-script").read() == "script" and not os.listdir("runs/new")
    """
    before = tree(home)
    for folder in folders:
        folder.mkdir(parents=True)
        request_of.save(folder)
    ran = run_protected(code, home / "work", folders[0].parent, request_of)
    assert ran.code == 0, ran.output
    assert tree(home) == before
    for folder in folders:
        assert (folder / "outcome").read_text() == "script and run"
        protection = Protection.load(folder)
        assert protection is not None and protection.kind == request_of.kinds[0]
        assert (protection.files, protection.removed) == (2, 1)


def test_the_layer_goes_with_a_killed_run(home: Path, request_of: SandboxRequest) -> None:
    before = tree(home)
    code = "import os, signal; open('x', 'w').write('x'); os.kill(os.getpid(), signal.SIGKILL)"
    ran = run_protected(code, home / "work", home.parent / "scratch", request_of)
    assert ran.code == -9
    assert tree(home) == before


def test_writes_that_are_allowed(home: Path) -> None:
    request = SandboxRequest(allow_writes=True)
    code = "open('new.txt', 'w').write('x')"
    ran = run_protected(code, home / "work", home.parent / "scratch", request)
    assert ran.code == 0, ran.output
    assert (home / "work" / "new.txt").read_text() == "x"
    assert ran.protection is not None and ran.protection.kind == "none"


def test_nothing_protects(home: Path) -> None:
    before = tree(home)
    request = SandboxRequest(kinds=())
    code = "open('new.txt', 'w').write('x')"
    ran = run_protected(code, home / "work", home.parent / "scratch", request)
    assert ran.protection is not None and ran.protection.not_run
    assert "--allow-writes" in ran.protection.stopped
    assert tree(home) == before


def test_a_full_disk(home: Path, request_of: SandboxRequest) -> None:
    """The disks of the layer are full: the script sees that, and its files are what they were."""
    small = "mount -t tmpfs -o size=4m small"
    prefix = ["unshare", "-m", "sh", "-c"]
    # What the run needs of what lies in /tmp: its folder, the checkout, the interpreter.
    needed = (home.parent, Path(__file__).parents[3], Path(sys.prefix), Path(sys.base_prefix))
    kept = [each for each in dict.fromkeys(needed) if each.is_relative_to("/tmp")]
    mounts = " && ".join(
        (
            "mount -t tmpfs kept /mnt",
            *(f"mkdir /mnt/{i} && mount --bind {each} /mnt/{i}" for i, each in enumerate(kept)),
            f'{small} /tmp && mkdir -p "$TMPDIR"',
            *(f"mkdir -p {each} && mount --bind /mnt/{i} {each}" for i, each in enumerate(kept)),
            f"{small} /var/tmp",
        )
    )
    try:
        subprocess.run([*prefix, mounts], env={**os.environ, "TMPDIR": "/tmp"}, check=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no small disk can be mounted here")
    before = tree(home)
    code = """
    import errno
    from trainfit.scripts.sandbox import hint
    try:
        with open("last.pt", "wb", buffering=0) as stream:
            for _ in range(4):
                stream.write(bytes(2_000_000))
                stream.write(bytes(2_000_000))
    except OSError as error:
        assert error.errno == errno.ENOSPC
        print(hint(error))
    """
    words = [*prefix, f'{mounts} && exec "$0" "$@"']
    ran = run_protected(code, home / "work", home.parent / "s", request_of, prefix=words)
    assert ran.code == 0, ran.output
    assert "layer for the script's writes is full" in ran.output
    assert tree(home) == before
