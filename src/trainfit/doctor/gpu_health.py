"""Checks of a GPU's health: clock throttling, temperature, power limit, ECC errors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from trainfit.doctor import thresholds as policy
from trainfit.doctor.findings import bad, evidence, good, on_host, unsure, which
from trainfit.hardware.local_gpu import gpus_of_job
from trainfit.results.doctor import Check
from trainfit.results.findings import Evidence, Fix
from trainfit.results.machine import Gpu, Machine
from trainfit.results.text import count, ghz, percent

_THERMAL = ("hw_thermal_slowdown", "sw_thermal_slowdown")
#: Clocks lowered by a setting, with the names that NVML has had for it.
_SETTINGS = ("applications_clocks_setting", "user_defined_clocks", "application_clocks_setting")


def each_gpu(
    judge: Callable[[Machine, Gpu], Check | None],
) -> Callable[[Machine], tuple[Check, ...]]:
    """A check of each GPU that answers NVML and that it applies to."""
    return lambda machine: of_gpus(machine, filter(answers, gpus_of_job(machine)), judge)


def of_gpus(
    machine: Machine, gpus: Iterable[Gpu], judge: Callable[[Machine, Gpu], Check | None]
) -> tuple[Check, ...]:
    """One check of each of these GPUs that it applies to, which is the check's subject; where
    something is wrong or not known, with its model."""
    checks = ((gpu, judge(machine, gpu)) for gpu in gpus)
    return tuple(
        replace(check, subject=f"GPU {gpu.index}" if check.verdict == "good" else which(gpu))
        for gpu, check in checks
        if check is not None
    )


def answers(gpu: Gpu) -> bool:
    """Does the driver say anything of it? (Else only its name and place are known.)"""
    facts = (gpu.memory_bytes, gpu.used_bytes, gpu.temperature_c, gpu.clock_reasons, gpu.processes)
    return any(fact.state != "cannot_tell" for fact in facts)


# --- Does it answer? --------------------------------------------------------------------------


def check_state(machine: Machine) -> tuple[Check, ...]:
    """GPUs that have fallen off the bus or want a reset; nothing of those that answer."""
    # Also of those that a mask hides: CUDA may fail to start because of them.
    gpus = machine.gpus.value or ()
    return of_gpus(machine, (gpu for gpu in gpus if _lost_word(gpu)), _lost)


def _lost_word(gpu: Gpu) -> str:
    if answers(gpu):
        return ""
    reason = gpu.memory_bytes.reason
    return next((word for word in ("GPU_IS_LOST", "RESET_REQUIRED") if word in reason), "")


def _lost(machine: Machine, gpu: Gpu) -> Check:
    lost = _lost_word(gpu) == "GPU_IS_LOST"
    reset = Fix(
        f"sudo nvidia-smi -i {gpu.index} --gpu-reset",
        "none: a reset cannot be undone",
        on_host(machine, "all jobs on this GPU must be stopped first"),
    )
    restart = Fix(
        "sudo dmesg | grep -i xid; sudo reboot",
        "none: a reboot cannot be undone",
        on_host(
            machine,
            "reboots; terminates all running jobs. If it recurs, reseat or replace the card",
        ),
    )
    return bad(
        "gpu-state",
        "gpu_lost" if lost else "gpu_reset_required",
        "it has fallen off the bus" if lost else "the driver requires a reset",
        "no job can use it, and CUDA may fail to initialize on the other GPUs as well. Usual "
        "causes: power, heat, bad seating or a broken card; the kernel log names an Xid.",
        [evidence("NVML", gpu.memory_bytes)],
        [restart] if lost else [reset, restart],
    )


# --- Clocks -----------------------------------------------------------------------------------


@each_gpu
def check_clocks(machine: Machine, gpu: Gpu) -> Check | None:
    """NVML's reasons for the clocks of each GPU at this moment."""
    name = "gpu-clocks"
    reasons = gpu.clock_reasons
    found = [
        evidence("clock reasons", reasons, lambda names: ", ".join(names) or "none"),
        evidence("SM clock", gpu.sm_hz, ghz),
        evidence("maximum SM clock", gpu.sm_max_hz, ghz),
        evidence("application clock", gpu.application_sm_hz, ghz),
        evidence("temperature", gpu.temperature_c, _degrees),
        evidence("P-state", gpu.performance_state, lambda state: f"P{state}"),
    ]
    if reasons.value is None:
        if reasons.is_absent:
            return None
        return unsure(
            name,
            "clock throttling reasons could not be read",
            "NVML's answer",
            found,
        )
    active = set(reasons.value)
    check = (
        _hot(machine, gpu, name, active, found)
        or _power_brake(gpu, name, active, found)
        or _hardware_slowdown(gpu, name, active, found)
        or _setting(machine, gpu, name, active, found)
    )
    return check or _clocks_fine(gpu, name, active, found)


def _hot(
    machine: Machine, gpu: Gpu, name: str, active: set[str], evidence: list[Evidence]
) -> Check | None:
    if not active & set(_THERMAL):
        return None
    text = f" at {_degrees(gpu.temperature_c.value)}" if gpu.temperature_c.value is not None else ""
    return bad(
        name,
        "gpu_thermal_slowdown",
        f"thermal throttling{text}",
        "the GPU runs below its maximum clock; the hardware slowdown halves it or more. Usual "
        "causes: dust, blocked airflow, a stopped fan, or a passively cooled card without server "
        "fans.",
        evidence,
        [
            Fix(
                "clean the cooler, clear the airflow, raise the fan speed "
                "(nvidia-settings, the server's BMC)",
                "restore the previous fan setting",
                "noise",
            ),
            _lower_power(machine, gpu),
        ],
    )


def _lower_power(machine: Machine, gpu: Gpu) -> Fix:
    limit = gpu.power_limit_w.value
    default = gpu.power_limit_default_w.value or limit
    text = f"{0.8 * default:.0f}" if default else "WATTS"
    former = f"{limit:.0f}" if limit else "FORMER_WATTS"
    return Fix(
        f"sudo nvidia-smi -i {gpu.index} -pl {text}",
        f"sudo nvidia-smi -i {gpu.index} -pl {former}",
        on_host(machine, "a few percent of the speed, but steadier than throttling"),
    )


def _power_brake(gpu: Gpu, name: str, active: set[str], evidence: list[Evidence]) -> Check | None:
    if "hw_power_brake_slowdown" not in active:
        return None
    return bad(
        name,
        "gpu_power_brake",
        "external power brake halves the clocks",
        "the power supply or the management controller (BMC) slows the GPU down: "
        "insufficient total power, a failed power supply, or a rack power cap.",
        evidence,
        [
            Fix(
                "sudo ipmitool sdr type 'Power Supply'  # then replace the supply or raise its cap",
                "restore the previous cap",
                "more of the rack's power budget",
            )
        ],
    )


def _hardware_slowdown(
    gpu: Gpu, name: str, active: set[str], evidence: list[Evidence]
) -> Check | None:
    if "hw_slowdown" not in active:
        return None
    if "gpu_idle" in active:
        return unsure(
            name,
            "hardware slowdown reported while idle",
            "NVML also reports it during clock changes: re-run while a job uses the GPU",
            evidence,
        )
    return bad(
        name,
        "gpu_hardware_slowdown",
        "hardware slowdown, clocks at half or less",
        "heat, the power brake, or overcurrent (NVML: HwSlowdown). Usual "
        "causes: loose power connectors, or one cable for two connectors.",
        evidence,
        [
            Fix(
                "power off, reseat the power cables, one cable per connector; then: "
                f"nvidia-smi -i {gpu.index} -q -d PERFORMANCE,TEMPERATURE,POWER",
                "none needed",
                "the machine is powered off meanwhile",
            )
        ],
    )


def _setting(
    machine: Machine, gpu: Gpu, name: str, active: set[str], evidence: list[Evidence]
) -> Check | None:
    """Clocks lowered by a setting; on data-centre GPUs a default below the maximum is normal."""
    now, maximum = gpu.sm_hz.value, gpu.sm_max_hz.value
    if not active & set(_SETTINGS) or "gpu_idle" in active or now is None or not maximum:
        return None
    if now >= policy.SETTING_CLOCK_SHARE * maximum:
        return None
    application, memory = gpu.application_sm_hz.value, gpu.memory_hz.value
    former = f"sudo nvidia-smi -i {gpu.index} -lgc {now / 1e6:.0f}"
    if application and memory:
        former = f"sudo nvidia-smi -i {gpu.index} -ac {memory / 1e6:.0f},{application / 1e6:.0f}"
    return bad(
        name,
        "gpu_clocks_lowered",
        f"SM clock limited to {ghz(now)} of {ghz(maximum)} by a setting",
        "application clocks or locked clocks were set; compute-bound kernels are slower "
        "in proportion.",
        evidence,
        [
            Fix(
                f"sudo nvidia-smi -i {gpu.index} -rac && sudo nvidia-smi -i {gpu.index} -rgc",
                former,
                on_host(machine, "power and heat; times vary more from run to run"),
            )
        ],
    )


def _clocks_fine(gpu: Gpu, name: str, active: set[str], evidence: list[Evidence]) -> Check:
    if "gpu_idle" in active:
        why = "an idle GPU lowers its clocks; re-run this while a job uses it to see the rest"
        return good(name, "clocks are low because it is idle", evidence, why)
    if "sw_power_cap" in active:
        why = "it runs at its power limit, as a fully used GPU does; check gpu-power shows whether "
        return good(name, "clocks limited by power", evidence, why + "that was lowered")
    return good(name, "clocks are not throttled", evidence)


def _degrees(value: float | None) -> str:
    return f"{value:.0f} °C" if value is not None else ""


# --- Temperature and power --------------------------------------------------------------------


@each_gpu
def check_temperature(machine: Machine, gpu: Gpu) -> Check | None:
    """Each GPU's temperature against that of its slowdown."""
    name = "gpu-temperature"
    now, limit = gpu.temperature_c, gpu.slowdown_c
    found = [
        evidence("temperature", now, _degrees),
        evidence("slowdown at", limit, _degrees),
    ]
    if now.value is None:
        if now.is_absent:
            return None
        return unsure(name, "temperature could not be read", "NVML's answer", found)
    if limit.value is None:
        needed = "the temperature at which this GPU slows down: nvidia-smi -q -d TEMPERATURE"
        return unsure(name, f"{_degrees(now.value)}, limit unknown", needed, found)
    summary = f"{_degrees(now.value)}, slows down at {_degrees(limit.value)}"
    if now.value < limit.value - policy.TEMPERATURE_MARGIN_C:
        return good(name, summary, found)
    return bad(
        name,
        "gpu_hot",
        summary,
        "near the slowdown temperature the clocks drop, and a long run "
        "is slower than its first minutes.",
        found,
        [
            Fix(
                "clean the cooler, clear the airflow, raise the fan speed",
                "restore the previous fan setting",
                "noise",
            ),
            _lower_power(machine, gpu),
        ],
    )


@each_gpu
def check_power(machine: Machine, gpu: Gpu) -> Check | None:
    """Each GPU's power limit against its default."""
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
        return unsure(name, "power limit could not be read", needed, found)
    if limit.value >= policy.POWER_SHARE * default.value:
        return good(name, f"power limit {_watts(limit.value)}", found)
    return bad(
        name,
        "gpu_power_limited",
        f"power limit {_watts(limit.value)}, default {_watts(default.value)}",
        f"it is lowered to {percent(limit.value / default.value)} of the default: compute-bound "
        "kernels run at a lower clock (losing less than the power does), memory-bound ones are "
        "hardly affected.",
        found,
        [
            Fix(
                f"sudo nvidia-smi -i {gpu.index} -pl {default.value:.0f}",
                f"sudo nvidia-smi -i {gpu.index} -pl {limit.value:.0f}",
                on_host(machine, "more power, heat and noise; the power supply must support it"),
            )
        ],
    )


def _watts(value: float) -> str:
    return f"{value:.0f} W"


# --- ECC --------------------------------------------------------------------------------------


@each_gpu
def check_ecc(machine: Machine, gpu: Gpu) -> Check | None:
    """Uncorrected memory errors of each GPU that counts them."""
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
            f"{count(errors.value, 'uncorrected memory error')}",
            "results computed from that memory are wrong, or the job was terminated with Xid 48 "
            "or 94. The next reset retires the page or remaps the row; recurring errors mean a "
            "failing card.",
            found,
            [
                Fix(
                    f"sudo nvidia-smi -i {gpu.index} --gpu-reset  # with no process on it; then: "
                    f"nvidia-smi -i {gpu.index} -q -d ECC,PAGE_RETIREMENT,ROW_REMAPPER",
                    "none: a reset cannot be undone",
                    on_host(
                        machine,
                        "all jobs on this GPU must be stopped; if errors recur, replace the card",
                    ),
                )
            ],
        )
    if gpu.ecc.is_absent:
        return None  # consumer GPUs have none
    if gpu.ecc.value is False:
        why = "bit errors go unnoticed; on GPUs with GDDR, ECC off leaves slightly more memory"
        return good(name, "ECC is off", found, why)
    if gpu.ecc.value is None or errors.value is None:
        needed = "NVML's ECC mode and error counts"
        return unsure(name, "ECC errors could not be read", needed, found)
    return good(name, "ECC is on, no uncorrected errors", found)
