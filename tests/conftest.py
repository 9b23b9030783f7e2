"""Where hypothesis' examples come from, and what makes all fast."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.internal.conjecture import providers

# The examples of `make test` are the same every time: what it says depends on the change alone.
# `make test-slow` tries others, five times as many (profile "chance"). No example fails for taking
# long: another process may have had the cores.
_UNTIMED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fixed", _UNTIMED, derandomize=True, max_examples=20)
settings.register_profile("chance", _UNTIMED, derandomize=False, max_examples=100)
settings.load_profile("fixed")

HERE = Path(__file__).parent
# As in an activated environment: a command's `python` is the one that has PyTorch.
os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
# Processes that tests start import PyTorch, and end, sooner; workers of xdist are among them.
_PATHS = [str(HERE / "quick_start"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, dict.fromkeys(_PATHS)))
# A shell's background job ignores Ctrl-C, and so would all that tests start and interrupt.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
# Tests are compiled when they are collected: no object of all that is garbage.
gc.disable()
#: CPython's own thresholds, which ``quick_start`` raises.
GARBAGE = (700, 10, 10)


def pytest_sessionstart() -> None:
    """hypothesis tries constants of the local modules imported so far, which other tests decide.

    A fixed example would be another one in a worker of xdist, or alone.
    """
    if settings.get_current_profile_name() == "fixed":
        none = providers.Constants()
        providers._get_local_constants = lambda: none


#: Where one file of a few tests may take half a minute: it is not the last to begin.
LONG = tuple(
    HERE / name
    for name in (
        *("test_watch_launch.py", "watch", "integrations", "cli", "loader", "scripts", "bench"),
        *("test_example_act.py", "simgpu/test_peers.py", "plan"),
    )
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, help="see tests/forked_workers.py")


def pytest_configure(config: pytest.Config) -> None:
    if count := config.option.workers:
        from forked_workers import ForkedWorkers

        config.pluginmanager.register(ForkedWorkers(count))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first."""
    files = {item.path for item in items}
    long = {path for path in files if any(map(path.is_relative_to, LONG))}
    items.sort(key=lambda item: (item.path not in long, item.path))


def pytest_collection_finish(session: pytest.Session) -> None:
    """PyTorch and thousands of tests stay until the end: no garbage collection looks at them."""
    gc.enable()
    gc.set_threshold(*GARBAGE)
    gc.collect()
    gc.freeze()
    if session.config.option.workers and not session.config.option.collectonly:
        from helpers_warm import serve_ahead

        serve_ahead()
    # Workers share the cores, where a second thread of an operator mostly waits for its turn, and
    # keeps a core busy meanwhile. Processes that tests start have as many threads as a user's.
    if "PYTEST_XDIST_WORKER" in os.environ and (torch := sys.modules.get("torch")):
        torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Who gives tests out to workers collects none itself."""
    gc.enable()


@pytest.fixture(autouse=True)
def _no_import_hook_stays() -> Iterator[None]:
    """One that stays would patch what a later test of this process imports, for good."""
    before = len(sys.meta_path)
    yield
    left = [each for each in sys.meta_path[: len(sys.meta_path) - before] if _is_ours(each)]
    assert not left, f"the test left import hooks: {left}"


def _is_ours(finder: object) -> bool:
    return type(finder).__module__.partition(".")[0] == "trainfit"


@pytest.fixture
def warm() -> Iterator[None]:
    """Simulated runs that the test starts are forked from a warm process (``helpers_warm``)."""
    from helpers_warm import warm_runs

    with warm_runs():
        yield


@pytest.fixture
def brief() -> Iterator[None]:
    """Plans make fewer simulated runs (``helpers_plan``): the test is not about the others."""
    from helpers_plan import brief_plans

    with brief_plans():
        yield


@pytest.fixture
def brief_with_ends() -> Iterator[None]:
    """As ``brief``, with runs to the end of an epoch."""
    from helpers_plan import brief_plans

    with brief_plans(ends=True):
        yield


@pytest.fixture
def unconfirmed() -> Iterator[None]:
    """As ``brief``, with both precisions."""
    from helpers_plan import brief_plans

    with brief_plans(both_precisions=True):
        yield


@pytest.fixture
def warm_measuring() -> Iterator[None]:
    """Runs that time something are, too: what they measure is not the test's subject."""
    from helpers_warm import MEASURING, warm_runs

    with warm_runs(MEASURING):
        yield
