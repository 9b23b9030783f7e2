"""The process that ``helpers_warm`` forks runs from: it has imported what every run imports.

Its first argument is the descriptor of a socket. A message there is a JSON document (``code``,
``argv``, ``cwd``, ``environment``) with four descriptors: a run's standard input, output, error,
and a socket that is told the run's number when it begins and its wait status when it ends. Each
run has a parent of its own, which ends it when nobody listens any more.
"""

import atexit
import contextlib
import gc
import importlib
import json
import multiprocessing.process
import os
import select
import signal
import socket
import sys
import threading

#: What ``trainfit.scripts.fork_server`` imports before it forks, and what is imported with it.
MODULES = (
    *("trainfit.scripts.trace_run", "torch._dynamo", "trainfit.scripts.fork_server"),
    *("trainfit.simgpu.cuda_clocks", "trainfit.speed.step", "numpy.ma"),
)


def serve(control):
    """Returns in each run, with what it is asked; never in this process."""
    parents = set()
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1 << 20, 4)
        parents -= {pid for pid in parents if os.waitpid(pid, os.WNOHANG)[0]}
        if not message:
            for pid in parents:
                os.waitpid(pid, 0)
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            control.close()
            asked = begin(json.loads(message), descriptors)
            if asked is not None:
                return asked
            os._exit(0)
        parents.add(pid)
        for each in descriptors:
            os.close(each)


def begin(asked, descriptors):
    """Start the run and wait for it; in the run itself returns what is asked."""
    *streams, listener = descriptors
    pid = os.fork()
    if pid:
        for each in streams:
            os.close(each)
        watch(pid, listener)
        return None
    os.setsid()
    os.write(listener, os.getpid().to_bytes(8, "little"))
    os.close(listener)
    for target, source in enumerate(streams):
        os.dup2(source, target)
        os.close(source)
    return asked


def watch(pid, listener):
    """Tell ``listener`` the run's end, or end the run when it is gone."""
    handle = os.pidfd_open(pid)
    if listener in select.select([handle, listener], [], [])[0]:
        os.killpg(pid, signal.SIGKILL)
    status = os.waitpid(pid, 0)[1]
    with contextlib.suppress(OSError):
        os.write(listener, status.to_bytes(8, "little"))


for name in MODULES:
    importlib.import_module(name)
importlib.import_module("trainfit.hardware").catalogue()
gc.freeze()  # no run looks through what all share, which would copy it
asked = serve(socket.socket(fileno=int(sys.argv[1])))
sys.argv = ["-c", *asked["argv"]]
os.chdir(asked["cwd"])
# Where a spawned process looks for the script: the folder in which Python was started.
multiprocessing.process.ORIGINAL_DIR = os.getcwd()
os.environ.clear()
os.environ.update(asked["environment"])
exec(asked["code"])
# As a process ends, but for taking PyTorch down, which is most of the time of a small run.
threading._shutdown()
atexit._run_exitfuncs()
sys.stdout.flush()
sys.stderr.flush()
os._exit(0)
