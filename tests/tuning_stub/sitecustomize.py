"""Put on PYTHONPATH, this stands in for the tuner: a result that says what it was given.

It looks at the process as a tuner would find it. What it does is chosen by the variable
STUB_TUNER: "facts" (by default), "fail", "die", "hang", each after ``keep`` with "keep-…".
"""

import importlib.util
import json
import multiprocessing
import os
import runpy
import sys
import threading
import time
from pathlib import Path


def tune(workload, machine, spec, *, command, loader, progress, whole):
    import dataclasses

    from helpers_loader import result

    options = dataclasses.asdict(spec)
    del options["step"], options["step_is_bound"]
    consumer = spec.step
    what = os.environ.get("STUB_TUNER", "facts")
    progress("one worker", 0.25)
    if what.startswith("keep-"):
        progress.keep(result(command=command, loader=loader))
    if what.endswith("die"):
        os.kill(os.getpid(), 9)
    if what.endswith("hang"):
        pid = os.fork()
        if not pid:
            os.setpgid(0, 0)
            time.sleep(600)
        progress(f"process {pid}", 0.5)
        time.sleep(600)
    if what.endswith("fail"):
        raise RuntimeError("the stub\nfails")
    seen = facts(workload) | {"options": options, "consumer": consumer.step_s}
    seen["cores"] = [machine.usable_cores, whole.usable_cores if whole is not None else None]
    progress("2 workers", 0.75)
    return result(
        command=command,
        loader=loader,
        machine=machine,
        step_s=consumer.step_s,
        step_source=consumer.source,
        notes=(json.dumps(seen),),
    )


def facts(workload):
    import torch

    from trainfit.results.dataloader import LoaderSettings
    from trainfit.simgpu import session

    main = sys.modules["__main__"]
    before, threads = multiprocessing.active_children(), other_threads()
    batches = {}
    for method in os.environ.get("STUB_METHODS", "fork").split():
        given = iter(workload.loader(LoaderSettings(1, start_method=method)))
        try:
            batch = next(given)
        except RuntimeError as error:  # a script without ``if __name__ == "__main__"``
            batches[method] = str(error)
            continue
        given._shutdown_workers()
        tensor = batch[0] if isinstance(batch, list) else batch
        batches[method] = [type(tensor).__name__, str(tensor.device), list(tensor.shape)]
    return {
        "main": os.path.abspath(getattr(main, "__file__", "")),
        "argv": sys.argv,
        "cwd": os.getcwd(),
        "path": sys.path[0],
        "workers": len(before),
        "threads": threads,
        "simulating": session._active is not None,
        "cuda": torch.cuda.is_available(),
        "batches": batches,
        "present": workload.present.num_workers,
        "iterator": getattr(workload._loader, "_iterator", None) is not None,
        "loader": type(workload._loader).__name__,
    }


def other_threads():
    """A closed queue's thread takes a moment to end."""
    deadline = time.monotonic() + 5
    while True:
        names = [t.name for t in threading.enumerate() if t is not threading.main_thread()]
        if "QueueFeederThread" not in names or time.monotonic() > deadline:
            return names
        time.sleep(0.01)


def loader_machine(machine, ranks=1):
    from helpers_loader import machine as fixture

    return fixture(usable_cores=machine.cpu.usable_cores.value / ranks)


def unknowns(machine):
    return ("a core is not known",)


def cores(machine, settings, ranks):
    return None


def why_none(machine, settings, ranks):
    return "all cores are alike"


runpy.run_path(str(Path(__file__).parents[1] / "quick_start" / "sitecustomize.py"))


class Replacing:
    """Puts the functions above in the place of those that ``local_tuning`` has or imports."""

    def find_spec(self, name, path, target=None):
        if name != "trainfit.loader.local_tuning":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            for function in (tune, loader_machine, unknowns, cores, why_none):
                setattr(module, function.__name__, function)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Replacing())
