"""Words that messages and reports have in common."""


def count(number: int, thing: str, plural: str = "") -> str:
    """A number with its noun: "1 step", "2 steps"; ``plural`` is one that is not made by "s"."""
    return f"{number} {thing}" if number == 1 else f"{number} {plural or thing + 's'}"


def size(nbytes: float) -> str:
    """Bytes with a unit: GiB and MiB with one decimal at most."""
    for unit, name in ((1 << 40, "TiB"), (1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if abs(nbytes) >= unit:
            return f"{_number(nbytes / unit)} {name}"
    return f"{nbytes:.0f} B"


def rate(bytes_per_s: float) -> str:
    """A rate in MB/s or GB/s."""
    if bytes_per_s >= 1e9:
        return f"{_number(bytes_per_s / 1e9)} GB/s"
    return f"{_number(bytes_per_s / 1e6)} MB/s"


def cores(number: float) -> str:
    """A number of cores, that a quota may make fractional."""
    return f"{number:.2f}".rstrip("0").rstrip(".")


def core_count(number: float) -> str:
    """The same with its noun: "1 core", "1.5 cores"."""
    said = cores(number)
    return f"{said} core{'' if said == '1' else 's'}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.1f}"
