"""tests/forked_workers.py: what forked workers tell is what one process would have told."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CONFTEST = """
from forked_workers import ForkedWorkers
def pytest_configure(config):
    config.pluginmanager.register(ForkedWorkers(2))
"""
#: A worker is at one of the two until the other has begun the second file.
FILES = {
    "test_a.py": """
import os, pathlib, time, warnings, pytest
def test_process():
    pathlib.Path("a").write_text(str(os.getpid()))
    while not os.path.exists("b"):
        time.sleep(0.01)
def test_wrong():
    print("printed before")
    warnings.warn("warned of")
    assert 1 == 2
@pytest.fixture(scope="module")
def opened():
    yield
    raise ValueError("not closed")
def test_fixture(opened): pass
""",
    "test_b.py": """
import os, pathlib, time
def test_process():
    pathlib.Path("b").write_text(str(os.getpid()))
    while not os.path.exists("a"):
        time.sleep(0.01)
def test_gone(): os._exit(3)
def test_after(): pass
""",
}


def told(folder: Path, *words: str) -> tuple[int, str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "torch.py").write_text("def set_num_threads(_): pass\n")
    paths = os.pathsep.join([str(folder), str(HERE)])
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-c", os.devnull, "--rootdir", ".", *words, "."],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": paths, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return done.returncode, done.stdout + done.stderr


def test_failures_output_and_a_worker_that_is_gone(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    code, said = told(tmp_path)
    assert code == 2 and "2 tests came to no end: their worker is gone" in said, said
    assert "2 failed, 3 passed, 1 warning, 1 error" in said
    assert "printed before" in said and "assert 1 == 2" in said and "warned of" in said
    assert "ValueError: not closed" in said
    assert "FAILED test_b.py::test_gone - its worker ended with exit code 3" in said
    assert (tmp_path / "a").read_text() != (tmp_path / "b").read_text()


def test_files_that_no_worker_is_left_for(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text("import os\ndef test(): os._exit(4)\n")
    code, said = told(tmp_path)
    assert code == 2 and "4 tests came to no end" in said, said
    assert said.count("ended with exit code 4") >= 2


def test_the_first_failure_ends_all(tmp_path: Path) -> None:
    (tmp_path / "test_a.py").write_text("def test(): assert 0\n")
    (tmp_path / "test_b.py").write_text("import time\ndef test(): time.sleep(100)\n")
    code, said = told(tmp_path, "-x")
    assert code == 2 and "1 failed" in said and "stopping after 1 failures" in said, said


def test_a_file_that_cannot_be_collected(tmp_path: Path) -> None:
    (tmp_path / "test_bad.py").write_text("import absent_module_of_nobody\n")
    (tmp_path / "test_good.py").write_text("def test(): pass\n")
    code, said = told(tmp_path)
    assert code == 2 and "No module named 'absent_module_of_nobody'" in said, said
