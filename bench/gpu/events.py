"""The allocator's own event history in compact columns.

One letter per event in ``kinds``:

    a   alloc                       addresses, sizes (as asked for)
    f   free_requested, and free_completed at once     addresses
    r   free_requested alone (the block waits for another stream)   addresses
    c   free_completed, later                          addresses
    S s segment_alloc, segment_free                    addresses, sizes
    M U segment_map, segment_unmap                     addresses, sizes
    o   oom                         sizes (asked for, rounded); free_bytes of the device

``addresses`` are in units of ``unit_bytes`` from ``base_address``, one for every letter but
``o``; ``sizes`` has an entry for every letter of "aSsMUo". ``streams`` are (event, stream)
pairs: from that event on it is that stream; 0 is the default one.
"""

from __future__ import annotations

from typing import Any

LETTERS = {
    "alloc": "a", "free_requested": "r", "free_completed": "c", "segment_alloc": "S",
    "segment_free": "s", "segment_map": "M", "segment_unmap": "U", "oom": "o",
}  # fmt: skip
SIZED = frozenset("aSsMUo")
UNIT = 512


def compact(trace: list[dict[str, Any]]) -> dict[str, Any]:
    """The columns of one device's trace; entries of other actions are left out."""
    entries = [entry for entry in trace if entry["action"] in LETTERS]
    kinds: list[str] = []
    addresses: list[int] = []
    sizes: list[int] = []
    free: list[int] = []
    streams: list[list[int]] = []
    stream = 0
    skip = False
    for index, entry in enumerate(entries):
        if skip:
            skip = False
            continue
        letter = LETTERS[entry["action"]]
        if letter == "r" and _completes(entry, entries, index + 1):
            letter, skip = "f", True
        if int(entry["stream"]) != stream:
            stream = int(entry["stream"])
            streams.append([len(kinds), stream])
        kinds.append(letter)
        if letter == "o":
            free.append(int(entry.get("device_free", 0)))
        else:
            addresses.append(int(entry["addr"]))
        if letter in SIZED:
            sizes.append(int(entry["size"]))
    base = min(addresses, default=0)
    unit = UNIT if all((address - base) % UNIT == 0 for address in addresses) else 1
    return {
        "kinds": "".join(kinds),
        "base_address": base,
        "unit_bytes": unit,
        "addresses": [(address - base) // unit for address in addresses],
        "sizes": sizes,
        "streams": streams,
        "free_bytes": free,
    }


def beginning(trace: list[dict[str, Any]], count: int) -> list[dict[str, Any]]:
    """The first ``count`` entries or a few less, so that no allocation is cut in two."""
    while count and trace[count - 1]["action"] not in ("alloc", "free_completed"):
        count -= 1
    return trace[:count]


def _completes(entry: dict[str, Any], entries: list[dict[str, Any]], place: int) -> bool:
    """Is the free that ``entry`` asks for complete with the next event?"""
    if place == len(entries):
        return False
    after = entries[place]
    return after["action"] == "free_completed" and after["addr"] == entry["addr"]


def segments(snapshot: dict[str, Any], device: int = 0) -> list[dict[str, Any]]:
    """The segments of a snapshot: blocks as [address, bytes, asked for, state's letter].

    States: a active, p pending (freed, waits for a stream), i inactive.
    """
    return [
        {
            "address": int(segment["address"]),
            "bytes": int(segment["total_size"]),
            "stream": int(segment["stream"]),
            "small": segment["segment_type"] == "small",
            "expandable": bool(segment.get("is_expandable", False)),
            "blocks": [
                [
                    int(block.get("address", 0)),
                    int(block["size"]),
                    int(block.get("requested_size", 0)),
                    _state(block["state"]),
                ]
                for block in segment["blocks"]
            ],
        }
        for segment in snapshot["segments"]
        if int(segment.get("device", 0)) == device
    ]


def _state(name: str) -> str:
    if name == "active_allocated":
        return "a"
    return "i" if name == "inactive" else "p"
