"""Rows of the ACT article: inference that is slower at 30 than at 60 calls a second."""

from __future__ import annotations

from _seeds import (
    Answer,
    Row,
    Verdict,
    adds_to,
    agrees,
    answered,
    condition,
    differs,
    gib,
    holds,
    impossible,
    ms,
    only,
    percent,
)

ROWS: list[Row] = []
row = adds_to(ROWS, "act")

#: On the model of the article's machine (bench/seeds.py makes it) everything is as simulated.
MODEL = "on a model of that machine"


def call_s(pace: Answer, hz: float | None) -> float:
    """Median seconds of a call at a rate; ``None``: back to back."""
    found = pace["back_to_back"] if hz is None else only(pace["rates"], hz=hz)
    seconds: float = found["calls"]["p50"]
    return seconds


def arm(pace: Answer, name: str) -> Answer:
    return only(pace["attribution"]["arms"], arm=name)


def groups(machine: Answer) -> list[Answer]:
    """The CPUs' cpufreq policies."""
    found: list[Answer] = machine["machine"]["cpu"]["policies"]["value"]
    return found


@row("symptom", "A call is slower at 30 Hz than at 60 Hz", "pace-article")
def slower(pace: Answer) -> Verdict:
    slow, fast = call_s(pace, 30.0), call_s(pace, 60.0)
    (found,) = pace["attribution"]["findings"]
    return holds(
        slow > 1.05 * fast,
        f"{ms(slow)} at 30 Hz, {ms(fast)} at 60, {MODEL}: {found['cause']}, "
        f"{percent(found['share']['value'])} of it",
    )


@row("command", "launch_sync.py … --fps 30, then --fps 60, compared by hand", "pace-here")
def compare_rates(pace: Answer) -> Verdict:
    text = ", ".join(f"{each['hz']:g} Hz {ms(each['calls']['p50'])}" for each in pace["rates"])
    assert {each["hz"] for each in pace["rates"]} == {30.0, 60.0}
    return answered(
        f"one command for both rates, in turns, with percentiles and the ratio to back to back "
        f"({ms(call_s(pace, None))}; {text}; a small network on this machine)"
    )


@row("command", "The robot with its remote cameras (zmq), in the loop", "pace-here")
def robot(pace: Answer) -> Verdict:
    return impossible(
        "needs the robot: there `trainfit pace --hz 30,60 -- python server.py` times a command "
        "that answers line by line, and `trainfit.pace.tick(30)` the loop itself"
    )


@row("practice", "temporal_ensemble_coeff: overlapping chunks are blended", "plan-policy")
def ensemble(plan: Answer) -> Verdict:
    seconds = plan["speed"]["now"]["seconds"]
    load = 30 * seconds
    return answered(
        f"then the network runs at every turn: 30 calls of {ms(seconds)} are {percent(load)} of a "
        "second (examples/act/policy.py:every_turn is that loop)"
    )


@row("command", "nvidia-smi dmon -s pucm -d 1", "doctor-machine")
def dmon(machine: Answer) -> Verdict:
    (gpu,) = machine["machine"]["gpus"]["value"]
    shown = [gpu[name]["value"] for name in ("power_w", "temperature_c", "utilisation", "sm_hz")]
    assert None not in shown
    return condition(
        f"`doctor` reads the same at one moment ({shown[0]:g} W, {shown[1]:g} °C, "
        f"{percent(shown[2])}, {shown[3] / 1e6:.0f} MHz) and says what each figure does not mean; "
        "over a longer time it names that command"
    )


@row("symptom", "dmon at 30 Hz: 23 to 36% busy, 21 W, clocks of 645 to 675 and 405 to 810 MHz",
     "gpus-4090", "pace-article")  # fmt: skip
def dmon_figures(card: Answer, pace: Answer) -> Verdict:
    boost = card["gpus"][0]["boost_clock_hz"]
    away = arm(pace, "gpu_awake")["recovered"]["value"]
    return condition(
        f"the same lines show the GPU itself at {percent(660e6 / boost)} of its boost clock; that "
        f"it was not the GPU needs `pace`'s arm that keeps it busy ({percent(away)} {MODEL})"
    )


@row("symptom", "dmon: 433 MB of the GPU's memory in use", "plan-policy")
def dmon_memory(plan: Answer) -> Verdict:
    low, high = plan["now"]["memory"]["device_range_bytes"]
    weights = plan["now"]["by_kind_bytes"]["parameter"]
    return holds(
        low < 433e6 < high,
        f"predicted {gib(low):.2f} to {gib(high):.2f} GiB for the policy, of which its weights are "
        f"{gib(weights):.2f}: less than that with any context was in use; which process it was, "
        "`nvidia-smi --query-compute-apps=pid,used_memory` says there",
    )


@row("symptom", "A call at 30 Hz needs 7 to 8 ms more, and the GPU is no busier", "plan-policy",
     "pace-article")  # fmt: skip
def excess(plan: Answer, pace: Answer) -> Verdict:
    now = plan["speed"]["now"]["seconds"]
    spans = [each["seconds"] - now for each in plan["speed"]["paced"]["slowed"]]
    more = call_s(pace, 30.0) - call_s(pace, 60.0)
    text = (
        f"{ms(min(spans))} to {ms(max(spans))} more are predicted for 3.5 to 1.7 of 4.0 GHz; "
        f"{ms(more)} {MODEL}"
    )
    return agrees(text) if min(spans) < 7e-3 < 8e-3 < max(spans) else differs(text)


@row("symptom", "Between calls at 30 Hz the CPU's clock falls or it sleeps more deeply",
     "pace-article")  # fmt: skip
def clock_or_sleep(pace: Answer) -> Verdict:
    clock, idle = arm(pace, "sleep")["speed"], arm(pace, "no_idle_states")["recovered"]["value"]
    return holds(
        clock < 0.9 or idle > 0.5,
        f"the clock and not idle states, tested one by one: a fixed loop runs at {percent(clock)} "
        f"of its speed before paced calls; disabling deep idle states removes {percent(idle)} "
        f"({MODEL})",
    )


@row("symptom", "Waking, Python and kernel launches are slower at the next turn", "pace-article")
def waking(pace: Answer) -> Verdict:
    slow, fast = arm(pace, "sleep"), arm(pace, "back_to_back")
    late = only(pace["rates"], hz=30.0)["late"]["p99"]
    return holds(
        slow["cpu_s"] > 1.05 * fast["cpu_s"],
        f"CPU time of the call itself, {ms(fast['cpu_s'])} back to back and {ms(slow['cpu_s'])} "
        f"paced; starts are late by {ms(late)} (p99), {MODEL}",
    )


@row("symptom", "Many kernels a call multiply a slower launch", "plan-policy")
def launches(plan: Answer) -> Verdict:
    paced, now = plan["speed"]["paced"], plan["speed"]["now"]
    return holds(
        now["bound"] == "launches",
        f"{paced['launches']} launches a call take {ms(now['host_s'])} of CPU at 4 GHz, the "
        f"kernels {ms(now['gpu_s'])}: bound by {now['bound']}",
    )


@row("symptom", "At 60 Hz the CPU stays busy and keeps its clock", "pace-article")
def busy(pace: Answer) -> Verdict:
    away = arm(pace, "spin")["recovered"]["value"]
    return holds(
        away > 0.5,
        f"keeping the core busy between calls removes {percent(away)} of the excess ({MODEL})",
    )


@row("symptom", "Offline a call needs about 14.4 ms at any rate", "plan-policy", "pace-article")
def offline(plan: Answer, pace: Answer) -> Verdict:
    low, high = plan["speed"]["now"]["range_s"]
    text = f"predicted {ms(low)} to {ms(high)} for the network alone, at 4 GHz"
    if low <= 14.4e-3 <= high:
        return agrees(text)
    return differs(f"{text}: slightly below; the robot's own code is not included")


@row("command", "watch … /proc/cpuinfo: the mean of all CPUs' MHz", "doctor-cpu")
def mhz(machine: Answer) -> Verdict:
    now = [each["current_hz"] / 1e6 for each in groups(machine)]
    return answered(
        f"by group of cores, lowest to highest ({min(now):.0f} to {max(now):.0f} MHz of the "
        "recorded machine): a mean over performance and efficiency cores, idle and busy, "
        "hides the core that runs the loop"
    )


@row("symptom", "1.7 to 3.5 GHz at 30 Hz, a steady 4.0 at 60", "plan-policy", "doctor-cpu")
def clocks(plan: Answer, machine: Answer) -> Verdict:
    shares = sorted(each["core_share"] * 4 for each in plan["speed"]["paced"]["slowed"])
    now = [each["current_hz"] / 1e9 for each in groups(machine)]
    return holds(
        max(now) < 4.0,
        f"`plan` gives a call's time at both ends ({shares[0]:.1f} and {shares[1]:.1f} GHz); a "
        f"recorded 12th-generation Intel at rest shows {min(now):.1f} to {max(now):.1f} GHz",
    )


@row("command", "cat …/cpufreq/scaling_governor", "doctor-cpu")
def governor(machine: Answer) -> Verdict:
    names = {each["governor"] for each in groups(machine)}
    preferences = {each["energy_preference"] for each in groups(machine)}
    return answered(f"{', '.join(names)} on all CPUs, with EPP {', '.join(preferences)}, which is "
                    "what decides under intel_pstate")  # fmt: skip


@row("symptom", "powersave lowers the clock while idle, and explains the excess", "doctor-machine")
def powersave(machine: Answer) -> Verdict:
    found = only(machine["checks"], name="frequency")
    assert found["verdict"] == "cannot_tell"
    return condition(
        f"{found['title']}: the governor's name alone is no verdict, `trainfit pace` measures it"
    )


@row("command", "sudo cpupower frequency-set -g performance", "doctor-machine", "pace-article")
def performance(machine: Answer, pace: Answer) -> Verdict:
    found = only(machine["checks"], name="frequency")
    (fix,) = [each for each in found["fixes"] if "cpupower" in each["action"]]
    return answered(
        f"named with its undo ({fix['undo'].split('&&')[0].strip()}) and cost ({fix['cost']}); "
        f"`pace --fix governor` proves it and `pace --undo` ends it"
    )


@row("symptom", "Under performance both rates run at 4.0 GHz and the excess is gone",
     "pace-article")  # fmt: skip
def cured(pace: Answer) -> Verdict:
    before, after = (pace["fix_trial"][name]["calls"]["p50"] for name in ("before", "after"))
    text = f"{ms(before)} before, {ms(after)} after `--fix governor` ({MODEL})"
    return agrees(text) if pace["fix_trial"]["is_fixed"] else differs(text)


@row("command", "cpupower frequency-info: the available governors", "doctor-cpu")
def governors(machine: Answer) -> Verdict:
    offered = {name for each in groups(machine) for name in each["available_governors"]}
    return answered(f"{' '.join(sorted(offered))}")


@row("command", "grep . …/cpuinfo_max_freq: 4.9, 5.0 and 3.8 GHz", "doctor-cpu")
def largest(machine: Answer) -> Verdict:
    most = sorted({each["hardware_hz"] / 1e9 for each in groups(machine)}, reverse=True)
    return answered(
        f"{' and '.join(f'{each:g}' for each in most)} GHz by group of cores of the recorded "
        "i9-12900K: two favoured cores, the other performance cores, the efficiency cores"
    )
