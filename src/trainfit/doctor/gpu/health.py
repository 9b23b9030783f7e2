"""What lowers a GPU's clocks, and whether its memory is sound."""

from __future__ import annotations

from collections.abc import Callable

from trainfit.doctor import thresholds as policy
from trainfit.doctor.figures import all_gpus, ghz, on_host, percent, which
from trainfit.doctor.findings import bad, evidence, good, unsure
from trainfit.results.files.words import count
from trainfit.results.machine.doctor import Check, Evidence, Fix
from trainfit.results.machine.machine import Gpu, Machine

_THERMAL = ("hw_thermal_slowdown", "sw_thermal_slowdown")
#: Clocks lowered by a setting, with the names that NVML has had for it.
_SETTINGS = ("applications_clocks_setting", "user_defined_clocks", "application_clocks_setting")


def each(machine: Machine, judge: Callable[[Machine, Gpu], Check | None]) -> tuple[Check, ...]:
    """One check a GPU, of those that answer NVML and that it applies to."""
    gpus = filter(answers, all_gpus(machine))
    return tuple(c for gpu in gpus if (c := judge(machine, gpu)) is not None)


def answers(gpu: Gpu) -> bool:
    """Does the driver say anything of it? (Else only its name and place are known.)"""
    facts = (gpu.memory_bytes, gpu.used_bytes, gpu.temperature_c, gpu.clock_reasons, gpu.processes)
    return any(fact.state != "cannot_tell" for fact in facts)


# --- Does it answer? --------------------------------------------------------------------------


def check_state(machine: Machine) -> tuple[Check, ...]:
    """GPUs that have fallen off the bus or want a reset; nothing of those that answer."""
    # Also of those that a mask hides: CUDA may fail to start because of them.
    gpus = machine.gpus.value or ()
    return tuple(_lost(machine, gpu) for gpu in gpus if _lost_word(gpu))


def _lost_word(gpu: Gpu) -> str:
    if answers(gpu):
        return ""
    reason = gpu.memory_bytes.reason
    return next((word for word in ("GPU_IS_LOST", "RESET_REQUIRED") if word in reason), "")


def _lost(machine: Machine, gpu: Gpu) -> Check:
    lost = _lost_word(gpu) == "GPU_IS_LOST"
    reset = Fix(
        f"sudo nvidia-smi -i {gpu.index} --gpu-reset",
        "none: a reset cannot be taken back",
        on_host(machine, "every job on this GPU has to end before it"),
    )
    restart = Fix(
        "sudo dmesg | grep -i xid; sudo reboot",
        "none: a restart cannot be taken back",
        on_host(machine, "every job on the machine ends; if it recurs, reseat or replace the card"),
    )
    return bad(
        "gpu-state",
        "gpu_lost" if lost else "gpu_reset_required",
        f"{which(gpu)}: it has fallen off the bus" if lost else f"{which(gpu)}: it wants a reset",
        "no job can use it, and CUDA may fail to start for the other GPUs as well. Power, heat, "
        "its seat or a broken card is the reason; the kernel's log names an Xid.",
        [evidence("NVML", gpu.memory_bytes)],
        [restart] if lost else [reset, restart],
    )


# --- Clocks -----------------------------------------------------------------------------------


def check_clocks(machine: Machine) -> tuple[Check, ...]:
    """NVML's reasons for the clocks of each GPU at this moment."""
    return each(machine, _clocks)


def _clocks(machine: Machine, gpu: Gpu) -> Check | None:
    name = "gpu-clocks"
    reasons = gpu.clock_reasons
    found = [
        evidence("clock reasons", reasons, lambda names: ", ".join(names) or "none"),
        evidence("SM clock", gpu.sm_hz, ghz),
        evidence("SM clock at most", gpu.sm_max_hz, ghz),
        evidence("application clock", gpu.application_sm_hz, ghz),
        evidence("temperature", gpu.temperature_c, _degrees),
        evidence("P-state", gpu.performance_state, lambda state: f"P{state}"),
    ]
    if reasons.value is None:
        if reasons.is_absent:
            return None
        return unsure(name, f"{which(gpu)}: clock reasons cannot be told", "NVML's answer", found)
    active = set(reasons.value)
    check = (
        _hot(machine, gpu, name, active, found)
        or _power_brake(gpu, name, active, found)
        or _hardware_slowdown(gpu, name, active, found)
        or _setting(machine, gpu, name, active, found)
    )
    return check or _clocks_fine(gpu, name, active, found)


def _hot(
    machine: Machine, gpu: Gpu, name: str, active: set[str], found: list[Evidence]
) -> Check | None:
    if not active & set(_THERMAL):
        return None
    at = f" at {_degrees(gpu.temperature_c.value)}" if gpu.temperature_c.value is not None else ""
    return bad(
        name,
        "gpu_thermal_slowdown",
        f"{which(gpu)}: clocks are lowered by heat{at}",
        "the GPU computes slower than it can, the hardware's own slowdown by half or more. Dust, "
        "blocked air, a stopped fan or a passive card without the server's fans is the reason.",
        found,
        [
            Fix(
                "clean the cooler, free the air's way, raise the fans (nvidia-settings, the "
                "server's BMC)",
                "the former fan setting",
                "noise",
            ),
            _lower_power(machine, gpu),
        ],
    )


def _lower_power(machine: Machine, gpu: Gpu) -> Fix:
    limit = gpu.power_limit_w.value
    default = gpu.power_limit_default_w.value or limit
    wanted = f"{0.8 * default:.0f}" if default else "WATTS"
    former = f"{limit:.0f}" if limit else "FORMER_WATTS"
    return Fix(
        f"sudo nvidia-smi -i {gpu.index} -pl {wanted}",
        f"sudo nvidia-smi -i {gpu.index} -pl {former}",
        on_host(machine, "some percent of the speed; steadier than to heat up and slow down"),
    )


def _power_brake(gpu: Gpu, name: str, active: set[str], found: list[Evidence]) -> Check | None:
    if "hw_power_brake_slowdown" not in active:
        return None
    return bad(
        name,
        "gpu_power_brake",
        f"{which(gpu)}: clocks are halved by the external power brake",
        "the machine's power supply or its management controller tells the GPU to slow down: too "
        "little power for all of it, a failed supply, or a power cap of the rack.",
        found,
        [
            Fix(
                "sudo ipmitool sdr type 'Power Supply'  # then replace the supply or raise its cap",
                "the former cap",
                "power of the rack",
            )
        ],
    )


def _hardware_slowdown(
    gpu: Gpu, name: str, active: set[str], found: list[Evidence]
) -> Check | None:
    if "hw_slowdown" not in active:
        return None
    if "gpu_idle" in active:
        return unsure(
            name,
            f"{which(gpu)}: a hardware slowdown is shown while it is idle",
            "NVML also shows it while the clock changes: run this again while a job uses the GPU",
            found,
        )
    return bad(
        name,
        "gpu_hardware_slowdown",
        f"{which(gpu)}: the hardware has lowered the clocks by half or more",
        "heat, the power brake, or a current that is too high (NVML: HwSlowdown). Plugs of the "
        "power cables that do not sit, or one cable for two plugs, are the usual reason.",
        found,
        [
            Fix(
                "switch off, seat the power cables, one cable a plug; then: "
                f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE,TEMPERATURE,POWER",
                "none needed",
                "the machine is switched off meanwhile",
            )
        ],
    )


def _setting(
    machine: Machine, gpu: Gpu, name: str, active: set[str], found: list[Evidence]
) -> Check | None:
    """Clocks lowered by a setting; on data-centre GPUs a default below the maximum is normal."""
    now, most = gpu.sm_hz.value, gpu.sm_max_hz.value
    if not active & set(_SETTINGS) or "gpu_idle" in active or now is None or not most:
        return None
    if now >= policy.SETTING_CLOCK_SHARE * most:
        return None
    application, memory = gpu.application_sm_hz.value, gpu.memory_hz.value
    former = f"sudo nvidia-smi -i {gpu.index} -lgc {now / 1e6:.0f}"
    if application and memory:
        former = f"sudo nvidia-smi -i {gpu.index} -ac {memory / 1e6:.0f},{application / 1e6:.0f}"
    return bad(
        name,
        "gpu_clocks_lowered",
        f"{which(gpu)}: a setting holds the SM clock at {ghz(now)} of {ghz(most)}",
        "application clocks or locked clocks were set; kernels that compute are slower by that "
        "ratio.",
        found,
        [
            Fix(
                f"sudo nvidia-smi -i {gpu.index} -rac && sudo nvidia-smi -i {gpu.index} -rgc",
                former,
                on_host(machine, "power and heat; times vary more from run to run"),
            )
        ],
    )


def _clocks_fine(gpu: Gpu, name: str, active: set[str], found: list[Evidence]) -> Check:
    if "gpu_idle" in active:
        why = "an idle GPU lowers its clocks; run this again while a job uses it to see the rest"
        return good(name, f"{which(gpu)}: clocks are low because it is idle", found, why)
    if "sw_power_cap" in active:
        why = "it works at its power limit, as a fully used GPU does; check gpu-power says whether "
        return good(
            name, f"{which(gpu)}: clocks follow the power limit", found, why + "that was lowered"
        )
    return good(name, f"{which(gpu)}: nothing lowers its clocks", found)


def _degrees(value: float | None) -> str:
    return f"{value:.0f} °C" if value is not None else ""


# --- Temperature and power --------------------------------------------------------------------


def check_temperature(machine: Machine) -> tuple[Check, ...]:
    """Each GPU's temperature against that of its slowdown."""
    return each(machine, _temperature)


def _temperature(machine: Machine, gpu: Gpu) -> Check | None:
    name = "gpu-temperature"
    now, limit = gpu.temperature_c, gpu.slowdown_c
    found = [
        evidence("temperature", now, _degrees),
        evidence("slowdown at", limit, _degrees),
    ]
    if now.value is None:
        if now.is_absent:
            return None
        return unsure(name, f"{which(gpu)}: its temperature cannot be told", "NVML's answer", found)
    if limit.value is None:
        needed = "the temperature at which this GPU slows down: nvidia-smi -q -d TEMPERATURE"
        return unsure(
            name, f"{which(gpu)}: {_degrees(now.value)}, its limit is not known", needed, found
        )
    summary = f"{which(gpu)}: {_degrees(now.value)}, slows down at {_degrees(limit.value)}"
    if now.value < limit.value - policy.TEMPERATURE_MARGIN_C:
        return good(name, summary, found)
    return bad(
        name,
        "gpu_hot",
        summary,
        "within a few degrees of the slowdown the clocks step down, and a long run at this heat "
        "is slower than its first minutes.",
        found,
        [
            Fix(
                "clean the cooler, free the air's way, raise the fans",
                "the former fan setting",
                "noise",
            ),
            _lower_power(machine, gpu),
        ],
    )


def check_power(machine: Machine) -> tuple[Check, ...]:
    """Each GPU's power limit against its default."""
    return each(machine, _power)


def _power(machine: Machine, gpu: Gpu) -> Check | None:
    name = "gpu-power"
    limit, default = gpu.power_limit_w, gpu.power_limit_default_w
    found = [
        evidence("power limit", limit, _watts),
        evidence("default limit", default, _watts),
        evidence("power now", gpu.power_w, _watts),
    ]
    if limit.is_absent or default.is_absent:
        return None  # laptops and integrated GPUs have none that could be set
    if limit.value is None or default.value is None:
        needed = "NVML's power limit and its default"
        return unsure(name, f"{which(gpu)}: its power limit cannot be told", needed, found)
    if limit.value >= policy.POWER_SHARE * default.value:
        return good(name, f"{which(gpu)}: power limit {_watts(limit.value)}", found)
    return bad(
        name,
        "gpu_power_limited",
        f"{which(gpu)}: power limit {_watts(limit.value)}, default {_watts(default.value)}",
        f"it is lowered to {percent(limit.value / default.value)} of the default: kernels that "
        "compute run at a lower clock (a smaller loss than that of power), those that move memory "
        "hardly.",
        found,
        [
            Fix(
                f"sudo nvidia-smi -i {gpu.index} -pl {default.value:.0f}",
                f"sudo nvidia-smi -i {gpu.index} -pl {limit.value:.0f}",
                on_host(machine, "power, heat and noise; the supply must bear it"),
            )
        ],
    )


def _watts(value: float) -> str:
    return f"{value:.0f} W"


# --- ECC --------------------------------------------------------------------------------------


def check_ecc(machine: Machine) -> tuple[Check, ...]:
    """Uncorrected memory errors of each GPU that counts them."""
    return each(machine, _ecc)


def _ecc(machine: Machine, gpu: Gpu) -> Check | None:
    name = "ecc"
    errors = gpu.ecc_errors
    found = [
        evidence("ECC", gpu.ecc, lambda on: "on" if on else "off"),
        evidence("uncorrected errors since the driver was loaded", errors),
    ]
    if errors.value:
        return bad(
            name,
            "ecc_errors",
            f"{which(gpu)}: {count(errors.value, 'uncorrected memory error')}",
            "results computed from that memory are wrong, or the job ended with an Xid 48 or 94. "
            "A page is retired or a row remapped at the next reset; more errors mean a bad card.",
            found,
            [
                Fix(
                    f"sudo nvidia-smi -i {gpu.index} --gpu-reset  # with no process on it; then: "
                    f"nvidia-smi -i {gpu.index} -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER",
                    "none: a reset cannot be taken back",
                    on_host(machine, "jobs on this GPU have to end; if errors return, replace it"),
                )
            ],
        )
    if gpu.ecc.is_absent:
        return None  # consumer GPUs have none
    if gpu.ecc.value is False:
        why = "wrong bits would not be noticed; on GPUs with GDDR it leaves some more memory"
        return good(name, f"{which(gpu)}: ECC is off", found, why)
    if gpu.ecc.value is None or errors.value is None:
        needed = "NVML's ECC mode and error counts"
        return unsure(name, f"{which(gpu)}: ECC errors cannot be told", needed, found)
    return good(name, f"{which(gpu)}: ECC is on, no uncorrected errors", found)
