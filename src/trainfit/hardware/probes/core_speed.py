"""Runs a small fixed piece of work on each core in turn; a script run by path.

Writes four doubles a piece to stdout: the monotonic time (s), the core, the CPU time that the
piece took (ns), and the ticks for which the core has been idle since the system started. Ends
with the process of the number given as its argument.
"""

import os
import struct
import sys
import time

#: Seconds between two rounds of the pieces: 1% of a core's time.
EVERY_S = 0.02
#: Cores that one round visits at most; more are visited in turns.
CORES_A_ROUND = 16
#: Iterations of a piece, some 50 us; the median of so many counts: the first finds cold caches,
#: an interrupt may fall into one, and the clock was seen to stand still for one.
ITERATIONS, TRIES = 1500, 3


def piece() -> int:
    """CPU time of one piece of work, in ns."""
    began = time.thread_time_ns()
    total = 0
    for number in range(ITERATIONS):
        total += number * number
    return time.thread_time_ns() - began


def idle_ticks() -> dict[str, int]:
    """Ticks that each core idled or waited for a disk, by its name in /proc/stat."""
    with open("/proc/stat") as file:
        rows = [line.split() for line in file if line.startswith("cpu")]
    return {row[0]: int(row[4]) + int(row[5]) for row in rows}


def main() -> None:
    """Until the parent is gone."""
    cores, parent = sorted(os.sched_getaffinity(0)), int(sys.argv[1])
    while os.getppid() == parent:
        ticks = idle_ticks()
        visited = cores[:CORES_A_ROUND]
        cores = cores[CORES_A_ROUND:] + visited
        for core in visited:
            try:
                os.sched_setaffinity(0, {core})
            except OSError:  # taken from us meanwhile
                continue
            took = sorted(piece() for _ in range(TRIES))[TRIES // 2]
            row = (time.monotonic(), core, took, ticks.get(f"cpu{core}", 0))
            os.write(1, struct.pack("dddd", *row))
        time.sleep(EVERY_S)


if __name__ == "__main__":
    main()
