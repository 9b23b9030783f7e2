"""The truth campaign: measures GPU memory in at least 60 training jobs, each in a process of
its own, and the step times of thirty jobs. One command, resumable; see
README.md next to this.

    python bench/gpu/campaign.py [--out DIR] [--only PATTERN] [--quick] [--time-limit S]

Needs an NVIDIA GPU and torch. What other packages would be needed for is listed as skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import os
import signal
import sys
import tarfile
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from gpu import cases, children, family_cases, simulated
from gpu.capped import CappedSearch, predict
from gpu.measure import FORMAT, MOST_EVENTS, VERSION, write

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]

#: What each model needs in addition to torch (a test compares this with models.py).
NEEDS = {
    "act_lerobot": "lerobot", "tv": "torchvision", "timm": "timm", "hf": "transformers",
    "peft": "peft",
}  # fmt: skip


@dataclasses.dataclass
class CampaignJob:
    """One result file to be made."""

    name: str
    request: dict[str, Any]
    case: cases.Case

    @property
    def file(self) -> str:
        return f"{self.name}.json.gz"


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 when all is measured, 1 when something is missing, 2 for bad options."""
    options = parse(argv)
    options.out.mkdir(parents=True, exist_ok=True)
    campaign = Campaign(options)
    if not campaign.jobs and not campaign.capped:
        print(f"--only {' '.join(options.only)}: no such result; --list shows all", file=sys.stderr)
        return 2
    # As it ends when told to by a time limit from outside.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        campaign.run()
    except KeyboardInterrupt:
        print("stopped; what was measured is kept, and the same command goes on")
    finally:
        campaign.close()
    return campaign.report()


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=HERE / "truth", help="where results go")
    parser.add_argument(
        "--only", action="append", default=[], metavar="PATTERN",
        help="only results with this in the name (* and ? may stand for more); repeatable",
    )  # fmt: skip
    parser.add_argument(
        "--families", action="store_true",
        help="the jobs of other people's models instead (family_cases.py)",
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="a few cases of each kind")
    parser.add_argument("--force", action="store_true", help="measure again what is there")
    parser.add_argument(
        "--time-limit", type=float, default=1500.0, metavar="S", help="stop after S seconds (1500)"
    )
    parser.add_argument(
        "--case-limit",
        type=float,
        default=120.0,
        metavar="S",
        help="seconds for one case (120)",
    )
    parser.add_argument(
        "--ready", type=int, default=3, metavar="N",
        help="processes kept prepared next to the one that measures (3)",
    )  # fmt: skip
    parser.add_argument(
        "--lanes", type=int, default=1, metavar="N",
        help="cases at a time on the GPU (1): less time, and no step times; one large one at most",
    )  # fmt: skip
    parser.add_argument(
        "--events", type=int, default=MOST_EVENTS, metavar="N",
        help=f"the allocator's events that a result keeps ({MOST_EVENTS}): 15000 are some 60 KB",
    )  # fmt: skip
    parser.add_argument("--bundle", type=Path, metavar="FILE", help="also pack all into one .tar")
    parser.add_argument("--list", action="store_true", help="show what would be measured")
    parser.add_argument("--no-profile", action="store_true", help="leave out what was reported")
    parser.add_argument(
        "--simulate", metavar="GPU", help="a rehearsal on a simulated GPU: no truth"
    )
    options = parser.parse_args(argv)
    if options.time_limit <= 0 or options.case_limit <= 0 or options.ready < 0:
        parser.error("--time-limit and --case-limit must be above 0, --ready 0 or more")
    if options.lanes < 1 or options.events < 1:
        parser.error("--lanes and --events must be 1 or more")
    if options.out.exists() and not options.out.is_dir():
        parser.error(f"--out {options.out}: not a folder")
    if options.simulate and options.out == HERE / "truth":
        parser.error("--simulate needs an --out of its own: a rehearsal is no truth")
    if options.simulate and (unknown := simulated.unknown_name(options.simulate)) is not None:
        parser.error(f"--simulate: {unknown}")
    return options


class Campaign:
    """The list of jobs, the processes that do them, and what became of each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.started = time.monotonic()
        self.scratch = tempfile.TemporaryDirectory(prefix="truth-")
        self.pool = ThreadPoolExecutor(max_workers=2)
        self.outcomes: dict[str, str] = {}
        self.jobs = list(jobs(options))
        self.capped = [case for case in chosen(options) if case.cap_bytes is not None]
        self._stopped = False
        self._packing = threading.Lock()

    # -- what there is to do ---------------------------------------------------------------

    def left_s(self) -> float:
        if self._stopped:
            return 0.0
        return self.options.time_limit - (time.monotonic() - self.started)

    def path(self, name: str) -> Path:
        return self.options.out / f"{name}.json.gz"

    def done(self, name: str) -> bool:
        """Is there a result that need not be made again?"""
        if self.options.force:
            return name in self.outcomes
        status = status_of(self.path(name))
        return status not in (None, "failed", "skipped", "bracketed")

    def run(self) -> None:
        if self.options.list:
            for name in [*(job.name for job in self.jobs), *(case.name for case in self.capped)]:
                print(name)
            return
        gpu = self.options.simulate or self.ask_gpu()
        if gpu is None:
            return
        predictions = self.predictions(gpu)
        self.plain()
        self.limited(predictions)

    def ask_gpu(self) -> dict[str, Any] | None:
        """What the GPU is; this process itself never touches it."""
        found = children.ask_gpu()
        if found is None:
            print("no NVIDIA GPU that torch can use: nothing was measured", file=sys.stderr)
            self.outcomes["gpu"] = "missing"
            return None
        name = found["gpu"]
        print(f"{name}: {len(self.jobs)} results and {len(self.capped)} limits to measure")
        return found

    # -- plain jobs --------------------------------------------------------------------------

    def plain(self) -> None:
        """As many at a time on the GPU as there are lanes; an interrupt ends them all."""
        waiting = [job for job in self.jobs if not self._settled(job)]
        shares = in_lanes(waiting, self.options.lanes)
        lanes = [threading.Thread(target=self.lane, args=(share,)) for share in shares]
        try:
            for lane in lanes:
                lane.start()
            for lane in lanes:
                lane.join()
        except BaseException:
            self._stopped = True
            children.stop_all()
            for lane in lanes:
                lane.join()
            raise

    def lane(self, share: list[CampaignJob]) -> None:
        """One after the other on the GPU; the next ones prepare themselves meanwhile."""
        waiting = deque(share)
        running: deque[tuple[CampaignJob, children.MeasuringProcess]] = deque()
        while (waiting or running) and self.left_s() > 0:
            while waiting and len(running) < 1 + self.options.ready:
                job = waiting.popleft()
                running.append((job, self.start(job)))
            job, child = running.popleft()
            self.finish(job, child)
        for job, child in running:
            child.stop()
            self.outcomes[job.name] = "out of time"
        for job in waiting:
            self.outcomes[job.name] = "out of time"

    def _settled(self, job: CampaignJob) -> bool:
        if self.done(job.name):
            self.outcomes[job.name] = "there"
            return True
        package = lacking(job.case)
        if package is not None:
            self.outcomes[job.name] = f"skipped: {package} is not installed"
            return True
        return False

    def start(self, job: CampaignJob) -> children.MeasuringProcess:
        request = {
            "output": str(self.path(job.name)),
            "simulate": self.options.simulate,
            "waits": True,
            "profile": not self.options.no_profile,
            "events": self.options.events,
            **job.request,
        }
        return children.MeasuringProcess(
            Path(self.scratch.name), job.name, request, job.case.alloc_conf
        )

    def finish(self, job: CampaignJob, child: children.MeasuringProcess) -> str:
        """Let a child measure, and see what it wrote; returns the result's status."""
        began = time.monotonic()
        limit = min(self.options.case_limit, max(self.left_s(), 1.0))
        problem = child.measure(limit)
        path = self.path(job.name)
        written = path.exists() and path.stat().st_mtime >= child.started - 1
        status = status_of(path) if written else None
        if status is None:
            status = "failed"
            self.write_failure(job, problem or "it wrote no result", child.output())
        self.outcomes[job.name] = status
        seconds = time.monotonic() - began
        self.say(f"{job.name}: {self.summary(job.name, status)} ({seconds:.1f} s)")
        self.pack(self.path(job.name))
        return status

    def write_failure(self, job: CampaignJob, problem: str, output: str) -> None:
        case = dataclasses.asdict(job.case)
        result = {
            "format": FORMAT, "version": VERSION, "status": "failed", "message": problem,
            "traceback": output[-6000:], "case": case, "simulated": bool(self.options.simulate),
        }  # fmt: skip
        write(self.path(job.name), result)

    def summary(self, name: str, status: str) -> str:
        result = read(self.path(name)) or {}
        if status in ("failed", "skipped"):
            return f"{status}: {str(result.get('message', '')).partition(chr(10))[0]}"
        if "timed" in result:
            return f"{status}, steps at {len(result['timed'])} batch sizes"
        memory = result["memory"]
        mib = 1 << 20
        return (
            f"{status}, allocated {memory['max_allocated_bytes'] / mib:.0f} MiB, "
            f"reserved {memory['max_reserved_bytes'] / mib:.0f} MiB, "
            f"{len(result['trace']['kinds'])} events"
        )

    # -- capped jobs -------------------------------------------------------------------------

    def predictions(self, gpu: str | dict[str, Any]) -> dict[str, Future[int | str]]:
        """Our own prediction of each limit's largest batch, made on the CPU meanwhile."""
        return {
            case.name: self.pool.submit(predict, case, gpu, self.scratch.name)
            for case in self.capped
            if not self.done(case.name) and lacking(case) is None
        }

    def limited(self, predictions: dict[str, Future[int | str]]) -> None:
        for case in self.capped:
            if case.name not in predictions:
                self.outcomes[case.name] = (
                    "there" if self.done(case.name) else f"skipped: {lacking(case)} is missing"
                )
                continue
            if self.left_s() <= 0:
                self.outcomes[case.name] = "out of time"
                continue
            predicted = wait_for(predictions[case.name], self.left_s())
            self.outcomes[case.name] = self.search(case, predicted)
            self.say(f"{case.name}: {self.outcomes[case.name]}")
            self.pack(self.path(case.name))

    def search(self, case: cases.Case, predicted: int | str) -> str:
        """Run the predicted batch and the one above; find the limit where that was wrong."""
        if isinstance(predicted, str):
            return f"skipped: {predicted}"
        search = CappedSearch(predicted)
        machine = None
        while (batch := search.next()) is not None and self.left_s() > 0:
            job = job_of(case.at(batch))
            if not self.done(job.name):
                status = self.finish(job, self.start(job))
            else:
                status = status_of(self.path(job.name)) or "failed"
            search.tell(batch, status)
            machine = (read(self.path(job.name)) or {}).get("machine", machine)
        if not search.tries:
            return "out of time"
        found = search.result()
        result = {
            "format": FORMAT,
            "version": VERSION,
            "status": "searched" if search.complete else "bracketed",
            "message": "",
            "simulated": bool(self.options.simulate),
            "case": dataclasses.asdict(case),
            "machine": machine,
            "capped": found,
        }
        if machine is not None:
            write(self.path(case.name), result)
        if not search.complete:
            return f"not found: {found['largest_ran']} ran, {found['smallest_full']} did not"
        return f"largest batch {found['largest_ran']}, predicted {found['predicted']}"

    # -- the end -----------------------------------------------------------------------------

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.started:6.0f} s] {text}", flush=True)

    def pack(self, path: Path) -> None:
        """Add a result to the bundle at once, so that a killed campaign keeps it."""
        bundle: Path | None = self.options.bundle
        if bundle is None or not path.exists():
            return
        bundle.parent.mkdir(parents=True, exist_ok=True)
        with self._packing, tarfile.open(bundle, "a") as archive:
            archive.add(path, path.name)

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
        children.stop_all()
        self.scratch.cleanup()

    def report(self) -> int:
        """Write the list of what was skipped, and sum up."""
        if self.options.list:
            return 0
        out = self.options.out
        write(out / "campaign.json", {"outcomes": self.outcomes})
        if self.options.bundle is not None:
            rebuild(self.options.bundle, out)
        good = [name for name, text in self.outcomes.items() if not _is_short(text)]
        print(f"{len(good)} of {len(self.outcomes)} results are in {out}")
        for name, text in self.outcomes.items():
            if _is_short(text):
                print(f"  {name}: {text}")
        return 0 if len(good) == len(self.outcomes) else 1


def _is_short(text: str) -> bool:
    return text.startswith(("skipped", "failed", "out of time", "not found", "missing"))


def jobs(options: argparse.Namespace) -> Iterator[CampaignJob]:
    """Plain jobs, with step times among them: whatever comes of the time, there is some of all."""
    plain = [job_of(case) for case in chosen(options) if case.cap_bytes is None]
    rest: list[CampaignJob] = []
    if options.lanes == 1 and not options.families:
        rest = [timed_job(case) for case in cases.chosen_timed(options.only, options.quick)]
    for index, job in enumerate(plain):
        yield job
        if index % 4 == 3 and rest:
            yield rest.pop(0)
    yield from rest


def chosen(options: argparse.Namespace) -> list[cases.Case]:
    if options.families:
        return cases.matching(family_cases.CASES, options.only)
    return cases.chosen(options.only, options.quick)


def in_lanes(jobs: list[CampaignJob], lanes: int) -> list[list[CampaignJob]]:
    """Equal shares in the order given; what is large is all in the first."""
    shares: list[list[CampaignJob]] = [[] for _ in range(lanes)]
    maximum = -(-len(jobs) // lanes)
    large = sum(job.case.model in family_cases.LARGE for job in jobs)
    for job in jobs:
        if job.case.model in family_cases.LARGE:
            large -= 1
            shares[0].append(job)
            continue
        open_ = [share for share in shares[1:] if len(share) < maximum]
        if len(shares[0]) + large < maximum:
            open_.append(shares[0])
        min(open_, key=len).append(job)
    return [share for share in shares if share]


def job_of(case: cases.Case) -> CampaignJob:
    return CampaignJob(case.name, {"kind": "case", "case": dataclasses.asdict(case)}, case)


def timed_job(timed: cases.TimedCase) -> CampaignJob:
    request = {"case": dataclasses.asdict(timed.case), "batches": timed.batches}
    return CampaignJob(timed.name, {"kind": "timed", **request}, timed.case)


def lacking(case: cases.Case) -> str | None:
    """The package that the case's model needs and that is not installed."""
    for prefix, package in NEEDS.items():
        if case.model == prefix or case.model.startswith(f"{prefix}_"):
            return cases.missing((package,))
    return None


def wait_for(future: Future[int | str], limit: float) -> int | str:
    try:
        return future.result(timeout=max(limit, 1.0))
    except TimeoutError:
        return "the prediction took too long"
    except Exception as error:
        return f"no prediction: {type(error).__name__}: {error}"[:300]


def read(path: Path) -> dict[str, Any] | None:
    """A result file, or ``None`` where there is none that is whole."""
    try:
        data = path.read_bytes()
        text = gzip.decompress(data) if path.suffix == ".gz" else data
        found = json.loads(text)
    except (OSError, ValueError, EOFError):
        return None
    return found if isinstance(found, dict) else None


def status_of(path: Path) -> str | None:
    found = read(path)
    return None if found is None else str(found.get("status"))


def rebuild(bundle: Path, out: Path) -> None:
    """The bundle rewritten, with each file once."""
    scratch = bundle.with_name(bundle.name + ".part")
    with tarfile.open(scratch, "w") as archive:
        for path in sorted(out.glob("*.json*")):
            if not path.name.endswith(".part"):
                archive.add(path, path.name)
    os.replace(scratch, bundle)


if __name__ == "__main__":
    sys.exit(main())
