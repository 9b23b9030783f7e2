"""The script's own code between the phases, on runs that are made by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from helpers_watch import finding, kinds, run, run_on_cpu, table
from trainfit.findings.own_code import habit_of
from trainfit.findings.sample_code import habit_of_samples
from trainfit.report.watch import answer, limit_of, nothing_found
from trainfit.results.findings import Finding
from trainfit.results.runs import tables
from trainfit.results.runs.watched import (
    COLLECTIONS,
    FIGURES,
    CodeLine,
    ElementLoop,
    Event,
    GrowingVariable,
    RunRecord,
    StackLooks,
    ThreadLooks,
)
from trainfit.results.watch import WatchResult
from trainfit.watch.judge import judge
from trainfit.watch.rules.code_lines import costliest, has_own_threads, waits_for

SAVES = CodeLine("save.py:9", 30, ("train.py:20",), "np.savez", "zipfile.write", "disk")
LOGS = CodeLine("train.py:22", 4, (), "print", "print")


def other(*lines: CodeLine, looks: int = 80, **changes: object) -> RunRecord:
    header = {"other_code": StackLooks(looks, lines)}
    return run_on_cpu(header=header, **{"other_s": 0.1, **changes})  # type: ignore[arg-type]


def test_the_costliest_line_is_named_with_what_it_does() -> None:
    result = judge(other(SAVES, LOGS))
    found = finding(result, "other_code")
    assert str(found.place) == "save.py:9" and "np.savez" in found.title
    assert found.share == pytest.approx(0.5 * 30 / 34, abs=0.02)
    assert result.limit == "script" and answer(result).startswith("save.py:9 writes a file")


def test_a_function_whose_time_is_in_many_lines_is_named_by_its_call() -> None:
    parts = [CodeLine(f"batch.py:{n}", 5, ("train.py:7",), "", "") for n in range(8)]
    line = costliest(StackLooks(100, tuple(parts)))
    assert line is not None and str(line.place) == "train.py:7" and line.count == 40
    assert str(finding(judge(other(*parts)), "other_code").place) == "train.py:7"


def test_few_lines_of_a_function_are_named_together() -> None:
    """A log that is written and synchronized in a function that the training loop calls."""
    write = CodeLine("train.py:12", 24, ("common.py:42",), "log.write", "log.write", "disk")
    sync = CodeLine("train.py:14", 32, ("common.py:42",), "os.fsync", "os.fsync", "disk")
    found = finding(judge(other(write, sync)), "other_code")
    assert str(found.place) == "train.py:14"
    assert found.title.startswith("train.py:12-14 waits until a disk has written (`os.fsync`)")
    assert found.share == pytest.approx(0.5, abs=0.02)


def test_three_steps_that_are_very_long_tell_what_they_wait_for() -> None:
    result = judge(other(SAVES, LOGS, steps=5, other_s=8.0))
    assert result.steps < 5 and kinds(result) == ["other_code"]
    healthy = judge(run_on_cpu(5, forward_s=5.0))
    assert not healthy.findings and nothing_found(healthy) == ""


def test_a_pool_of_threads_that_runs_python_code_is_waited_for() -> None:
    """And not a lock that somebody holds for too long."""
    waits = CodeLine("train.py:22", 60, (), "list", "waiter.acquire", "lock")
    decode = StackLooks(80, (CodeLine("train.py:11", 50, ("thread.py:58",), "append"),))

    def judged(
        threads: ThreadLooks, ready: float = 0.0, waits: CodeLine = waits, cpu_s: float = 0.02
    ) -> WatchResult:
        """``ready``: of the time, that in which the main thread has no core for other programs."""
        busy = {"cores_busy": 8.0, "cores_ours": 0.8, "runnable": 20.0} if ready else {}
        record = run_on_cpu(other_s=0.1, cpu_s=cpu_s, machine=busy)
        times = np.arange(0.0, 60.0, 0.5)
        row = {"time_s": times, "rank": 0, "role": 0, "pid": 100, "cpu_cores": 0.3}
        lacks = row | {"main_thread": ready, "threads": ready}
        rows = table(tables.CORE_WAITS, lacks, len(times))
        record = dataclasses.replace(record, core_waits=rows)
        looks = StackLooks(80, (waits,))
        first = record.ranks[0]
        header = dataclasses.replace(first.header, other_code=looks, other_threads=threads)
        return judge(
            dataclasses.replace(record, ranks=(dataclasses.replace(first, header=header),))
        )

    result = judged(ThreadLooks(decode, 0.12, 8, 0.9))
    found = finding(result, "other_code")
    assert "waits for 8 threads of the script, busy at train.py:11" in found.title
    assert "one thread at a time" in found.cause and "processes instead" in found.fix.action
    few = ThreadLooks(decode, 0.12, 8, 0.18)
    assert "waits for a lock" in finding(judged(few), "other_code").title
    assert "waits for 8 threads" in finding(judged(few, ready=0.8), "other_code").title
    side_by_side = finding(judged(ThreadLooks(decode, 0.9, 4, 3.4)), "other_code")
    assert "processes instead" not in side_by_side.fix.action
    for idle in (ThreadLooks(), ThreadLooks(decode, 0.02, 8, 0.1)):
        assert "waits for a lock" in finding(judged(idle), "other_code").title
    # Of a queue it is who fills it, also where the training computes more than that.
    get = dataclasses.replace(waits, calls="batches.get")
    some = ThreadLooks(decode, 0.12, 8, 0.3)
    assert "waits for a lock" in finding(judged(some, cpu_s=0.2), "other_code").title
    assert "waits for 8 threads" in finding(judged(some, waits=get, cpu_s=0.2), "other_code").title
    assert "waits for a queue" in finding(judged(ThreadLooks(), waits=get), "other_code").title


def test_few_steps_are_enough_where_they_are_long() -> None:
    result = judge(other(SAVES, LOGS, steps=14, other_s=3.0))
    assert result.steps < 20 and kinds(result) == ["other_code"] and result.limit == "script"
    assert "Too few" not in answer(result)
    short = judge(other(SAVES, LOGS, steps=14))
    assert not short.findings and answer(short).startswith("Too few steps")


@pytest.mark.parametrize(
    ("called", "inner"),
    [
        ("F.cross_entropy", "torch._C._nn.cross_entropy_loss"),
        ("nn.functional.layer_norm", "torch.layer_norm"),
        ("torch.softmax", "torch.softmax"),
    ],
)
def test_a_loss_that_no_module_computes_is_no_other_code(called: str, inner: str) -> None:
    loss = CodeLine("train.py:24", 70, (), called, inner)
    assert "other_code" not in kinds(judge(other(loss)))
    found = finding(judge(other(loss, SAVES)), "other_code")
    assert str(found.place) == "save.py:9" and found.share == pytest.approx(0.5 * 0.3, abs=0.02)


def test_it_replaces_the_advice_to_look_for_the_line() -> None:
    sleeps = CodeLine("train.py:8", 70, (), "time.sleep", "time.sleep", "sleep")
    found = kinds(judge(other(sleeps, other_s=1.0, cpu_s=0.09)))
    assert "other_code" in found and "script_waits" not in found
    few = CodeLine("train.py:8", 3, (), "time.sleep", "time.sleep", "sleep")
    assert "script_waits" in kinds(judge(other(few, looks=4, other_s=1.0, cpu_s=0.09)))


def test_a_busy_gpu_loses_nothing_by_it() -> None:
    header = {"other_code": StackLooks(80, (SAVES,))}
    assert "other_code" not in kinds(judge(run(header=header)))
    idle = judge(run(header=header, other_s=0.1, gpu_gap_s=0.1))
    assert "other_code" in kinds(idle)


LOOP = ElementLoop("model.py:9", "range(x.shape[1])", 50, 60, 80)
#: Outputs with what each image has of boxes.
RAGGED = dataclasses.replace(LOOP, over="zip(outputs, targets)", looks=16)


def test_a_line_of_which_looks_found_many_functions_is_named_by_one_that_is_known() -> None:
    known = CodeLine("data.py:9", 3, (), "rows.groupby[].mean", "np.arange")
    line = costliest(StackLooks(100, (CodeLine("data.py:9", 40), known)))
    assert line is not None and line.count == 43 and line.most == known
    habit = habit_of_samples(line.names)
    assert habit is not None and "pandas" in habit.what


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("np.load", "numpy.lib._npyio_impl.load"), "reads a whole file"),
        (("self.db.execute",), "asks a database"),
        (("Tokenizer.from_file",), "loads a model or a tokenizer"),
        (("AutoTokenizer.from_pretrained", "json.load"), "loads a model or a tokenizer"),
        (("re.sub", "re._compile"), "makes tokens"),
        (("PATTERN.findall",), "makes tokens"),
        (("self.cache[]", "multiprocessing.connection._recv"), "from another process"),
        (("ThreadPoolExecutor", "threading.wait"), "threads or processes"),
        (("torch.compile",), "prepares for each sample"),
        (("h5py.File", "h5py._hl.files.make_fid"), "opens the file"),
        (("h5py._hl.dataset.__getitem__", "self._fast_reader.read"), "reads from a chunked file"),
        (("self.log.info", "logging.emit"), "logs for each sample"),
        (("random.shuffle", "random._randbelow_with_getrandbits"), "a whole list for each sample"),
        (("np.random.normal", "np.random.normal"), "draws random numbers"),
        (("copy.deepcopy", "memo.get"), "copies in depth"),
        (("librosa.load", "soundfile.read"), "transforms sound"),
        (("cv2.VideoCapture",), "decodes video"),
        (("sorted", "glob._iglob"), "lists a folder"),
        (("self.tar.extractfile().read", "self._decompressor.decompress"), "unpacks"),
        (("tok.encode", "tok.encode"), "makes tokens"),
        (("scan.crop", "decoder.decode"), "decodes a whole picture"),
        (("Image.open().convert", "decoder.decode"), "decodes or resizes images"),
        (("self.photo.astype", "self.photo.astype"), "converts whole arrays"),
    ],
)
def test_what_samples_are_made_with(names: tuple[str, ...], words: str) -> None:
    habit = habit_of_samples(names)
    assert habit is not None and words in habit.what


@pytest.mark.parametrize(
    ("names", "over", "words"),
    [
        (("csv.reader",), "csv.reader(file)", "reads a whole table"),
        ((), "open(path)", "goes through a file"),
        (("row.split",), "self.rows", "goes over `self.rows`"),
        (("text.encode",), "texts", "goes over `texts`"),  # of a str
        (("tok.encode",), "texts", "makes tokens"),
        (("vocab.get",), "TOKEN.findall(clean(text))", "makes tokens"),
        (("float",), "self.rows.items()", "goes over `self.rows.items()`"),
        (("env.close", "env.close"), "", "opens the file for each sample"),
    ],
)
def test_a_loop_over_rows_of_a_file_reads_a_table(
    names: tuple[str, ...], over: str, words: str
) -> None:
    habit = habit_of_samples(names, over)
    assert habit is not None and words in habit.what
    # What the data set itself holds need not be gone over for each sample.
    assert ("and index that" in habit.action) == over.startswith("self.rows")


def test_a_commit_for_each_parameter_is_the_database_s_cost() -> None:
    call = CodeLine(
        "log.py:13",
        70,
        ("train.py:9",),
        "self.db.commit",
        "self.db.commit",
        "",
        "named_parameters()",
    )
    found = finding(judge(other(call)), "other_code")
    assert "writes to a database" in found.title and "one commit()" in found.fix.action


def test_a_decomposition_in_each_step_has_cheaper_ones() -> None:
    svd = CodeLine("train.py:9", 70, (), "torch.linalg.svd", "torch.linalg.svd")
    found = finding(judge(other(svd)), "other_code")
    assert "decomposes matrices" in found.title and "spectral_norm" in found.fix.action
    assert "decomposes" not in habit_of(("model.svd_loss",), "", has_loader=True).what


def test_a_loop_that_draws_for_each_element_is_the_loop_s_fault() -> None:
    habit = habit_of_samples(("random.random", "random.random"), "range(height)")
    assert habit is not None and "goes over `range(height)`" in habit.what


def test_a_function_that_goes_over_elements_is_told_to_use_operators() -> None:
    """Pixels that are counted one by one; not what calls a function for each of them."""
    own = CodeLine("iou.py:9", 60, ("train.py:41",), "", "iou.count", "", "zip(t, p)", "count")
    found = finding(judge(other(own)), "other_code")
    assert found.title.startswith("iou.py:9 goes over the elements of `zip(t, p)` in Python for")
    assert "torch.bincount" in found.fix.action
    numbers = finding(judge(other(dataclasses.replace(own, over="range(n)"))), "other_code")
    assert "goes over `range(n)` in Python" in numbers.title and "a deque" in numbers.fix.action
    of_loop = dataclasses.replace(own, callers=())
    calls = dataclasses.replace(own, calls="env.step", inner="env.step")
    for line in (of_loop, calls):
        assert "elements of" not in finding(judge(other(line)), "other_code").title


HOOK = CodeLine("probe.py:7", 40, (), "output.sort", "output.sort")


def test_a_hook_that_computes_statistics_is_named() -> None:
    """And no hook that costs little."""
    result = judge(run_on_cpu(header={"hook_code": StackLooks(80, (HOOK,))}))
    found = finding(result, "pass_code")
    assert str(found.place) == "probe.py:7" and "handle.remove()" in found.fix.action
    assert answer(result).startswith("A hook at probe.py:7 (`output.sort`) costs")
    assert "other Python code" not in limit_of(result)
    assert result.limit == "script"
    few = judge(run_on_cpu(header={"hook_code": StackLooks(800, (HOOK,))}))
    assert not few.findings


def test_what_sleeps_or_logs_in_the_model_is_named() -> None:
    line = CodeLine("model.py:7", 40, ("train.py:41",), "time.sleep", "time.sleep", "sleep")
    result = judge(run_on_cpu(header={"pass_code": StackLooks(80, (line,))}))
    found = finding(result, "pass_code")
    assert str(found.place) == "model.py:7" and "remove the sleep" in found.fix.action
    assert answer(result).startswith("model.py:7 sleeps (`time.sleep`) in the model")
    few = judge(run_on_cpu(header={"pass_code": StackLooks(800, (line,))}))
    assert not few.findings


def looped(loop: ElementLoop = LOOP, **columns: float) -> WatchResult:
    return judge(run_on_cpu(header={"element_loops": (loop,)}, **columns))


def test_a_loop_over_time_steps_in_the_forward_pass_is_named() -> None:
    result = looped(forward_s=0.02, backward_s=0.04)
    found = finding(result, "loop_over_elements")
    assert answer(result).startswith("model.py:9 goes over `range(x.shape[1])` in Python")
    assert "as fast" not in answer(result) and "nn.LSTM" in found.fix.action
    assert found.share == pytest.approx(0.58, abs=0.02) and result.limit == "script"
    assert found.value_of("a round, at most") == pytest.approx(0.75 * 0.02 / 50)


def test_what_comes_with_each_sample_is_gone_over_with_them() -> None:
    found = finding(looped(RAGGED, forward_s=0.02, backward_s=0.04), "loop_over_elements")
    assert found.severity == "info" and (found.share or 0.0) > 0.05
    alone = dataclasses.replace(RAGGED, over="outputs", looks=16)
    found = finding(looped(alone, forward_s=0.02, backward_s=0.04), "loop_over_elements")
    assert found.severity == "warning"


def test_a_loop_whose_rounds_compute_for_long_is_none() -> None:
    """A convolution of each frame of a video: one of all frames would not be quicker."""
    assert "loop_over_elements" not in kinds(looped(forward_s=0.2, backward_s=0.4))
    few = dataclasses.replace(LOOP, looks=3, of_looks=80)
    assert "loop_over_elements" not in kinds(looped(few, forward_s=0.02, backward_s=0.04))
    assert "loop_over_elements" not in kinds(judge(run(header={"element_loops": (LOOP,)})))


def test_little_of_it_is_nothing() -> None:
    assert "other_code" not in kinds(judge(other(SAVES, other_s=0.005)))


@pytest.mark.parametrize(
    ("names", "waits", "loader", "words"),
    [
        (("copy.deepcopy", "copy.deepcopy"), "", True, "AveragedModel"),
        (("f.flush", "os.fsync"), "disk", True, "fsync"),
        (("requests.post", "socket.recv"), "network", True, "queue"),
        (("torch.stack", "torch.stack"), "", False, "DataLoader"),
        (("subprocess.run", "selectors.select"), "", True, "psutil"),
        (("__main__.boundary_loss", "pow"), "", True, "whole tensors"),
        (("augment", "data.augment"), "", True, "data set"),
        (("time.sleep", "time.sleep"), "sleep", True, "remove the sleep"),
        (("torch.jit.trace", "torch.jit._trace.trace"), "", False, "once, before the loop"),
        (("inspect.stack", "inspect.findsource"), "", True, "_getframe"),
        (("bar.set_postfix", "tqdm.std.refresh"), "", True, "every 50 steps"),
        (("psutil.virtual_memory", "psutil._pslinux.open_binary"), "", True, "every few hundred"),
        (("TSNE().fit_transform", "sklearn.manifold._t_sne._fit"), "", True, "every 100 steps"),
        (("cv2.imwrite",), "", True, "less often"),
    ],
)
def test_what_to_do_instead(names: tuple[str, ...], waits: str, loader: bool, words: str) -> None:
    assert words in habit_of(names, waits, has_loader=loader).action


def test_what_its_module_is_called_does_not_say_that_it_makes_batches() -> None:
    names = ("np.histogram", "numpy.lib._histograms_impl.histogram")
    assert "DataLoader" not in habit_of(names, "", has_loader=False).action
    assert "statistics" in habit_of(names, "", has_loader=False).what
    names = ("np.linalg.norm", "numpy.linalg.norm")
    assert habit_of(names, "", has_loader=False).what == "runs Python code"


@pytest.mark.parametrize("over", ["model.named_parameters()", "group['params']", "self.shadow"])
def test_a_loop_over_parameters_is_told_from_others(over: str) -> None:
    """An average of the weights, a clipping by hand."""
    line = CodeLine("ema.py:8", 60, ("train.py:41",), "p.detach", "p.detach", "", over)
    found = finding(judge(other(line)), "other_code")
    assert "goes over the parameters one by one" in found.title and str(found.at) == "ema.py:8"
    assert "AveragedModel" in found.fix.action
    # What a function of a library computes of each (a histogram) has no form for all of them.
    computes = dataclasses.replace(line, calls="tracker.summarize", inner="a.sort")
    assert "parameters" not in finding(judge(other(computes)), "other_code").title
    elements = dataclasses.replace(line, over="range(len(tokens))")
    assert "parameters" not in finding(judge(other(elements)), "other_code").title


@pytest.mark.parametrize("kind", ["tensor", "array", "DataFrame"])
def test_a_line_that_adds_to_a_tensor_that_grows(kind: str) -> None:
    grows = GrowingVariable("m.preds", "metrics.py:5", kind, 100, 9000, 160, "tensors")
    line = CodeLine("metrics.py:5", 60, ("train.py:41",), "torch.cat", "torch.cat")
    record = other(line)
    rank = record.ranks[0]
    told = dataclasses.replace(rank.header, growing=(grows,))
    record = dataclasses.replace(record, ranks=(dataclasses.replace(rank, header=told),))
    found = finding(judge(record), "other_code")
    assert "copies all of `m.preds` to add to it (`torch.cat`)" in found.title
    assert "join that once" in found.fix.action


@pytest.mark.parametrize(("seen", "is_told"), [(50, True), (12, False)])
def test_who_holds_the_lock_that_the_training_waits_for(seen: int, is_told: bool) -> None:
    waits = CodeLine("train.py:13", 60, (), "", "__main__.log", "lock")
    holds = CodeLine("writer.py:8", seen, (), "os.fsync", "os.fsync", "disk")
    record = other(waits)
    rank = record.ranks[0]
    told = dataclasses.replace(rank.header, lock_code=StackLooks(60, (holds,)))
    record = dataclasses.replace(record, ranks=(dataclasses.replace(rank, header=told),))
    found = finding(judge(record), "other_code")
    assert found.title.startswith("train.py:13 waits for a lock")
    assert ("that a thread holds at writer.py:8" in found.title) == is_told


def test_what_a_line_calls_counts_with_all_that_it_calls() -> None:
    """A metric whose time is in many functions of its library, next to one operator."""
    line = ("train.py:21",)
    operator = CodeLine("train.py:21", 74, (), "out.argmax", "out.argmax")
    inner = [CodeLine("metric.py:9", n, line, "confusion_matrix", f"f{n}") for n in (50, 20, 9, 5)]
    several = CodeLine("metric.py:9", 14, line, "gt.flatten", "gt.flatten")
    found = finding(judge(other(operator, *inner, several)), "other_code")
    assert found.title.startswith("train.py:21 computes statistics (`confusion_matrix`)")


def test_handlers_that_become_more_are_why_a_line_logs_for_long() -> None:
    grows = GrowingVariable("log.handlers", "train.py:7", "list", 3, 395, 6000)
    for line, more in ((LOGS, True), (SAVES, False)):
        record = other(dataclasses.replace(line, count=60))
        rank = record.ranks[0]
        told = dataclasses.replace(rank.header, growing=(grows,))
        record = dataclasses.replace(record, ranks=(dataclasses.replace(rank, header=told),))
        found = finding(judge(record), "other_code")
        assert ("through more and more handlers" in found.title) == more
        assert ("grows at train.py:7" in found.fix.action) == more


def test_batches_of_what_the_training_itself_fills() -> None:
    """Of a replay memory there is no data set, and its batches are a part of such a training."""
    line = CodeLine("dqn.py:14", 60, ("train.py:41",), "torch.stack", "torch.stack")

    def told(*memories: str, line: CodeLine = line) -> Finding:
        record = other(line)
        rank = record.ranks[0]
        header = dataclasses.replace(rank.header, loaders=(), memories=memories)
        record = dataclasses.replace(record, ranks=(dataclasses.replace(rank, header=header),))
        return finding(judge(record), "other_code")

    by_hand, of_memory = told(), told("agent.memory")
    assert "by hand" in by_hand.title and by_hand.severity == "critical"
    assert "joins samples of `agent.memory`" in of_memory.title
    share = of_memory.share or 0.0
    assert of_memory.severity == ("warning" if share >= 0.5 else "info")
    assert "DataLoader" not in of_memory.fix.action
    environment = dataclasses.replace(line, calls="env.step", inner="env.step")
    assert "step together" in told("agent.memory", line=environment).fix.action
    logs = dataclasses.replace(line, calls="print", inner="print")
    assert told("agent.memory", line=logs) == told(line=logs)


def test_an_average_of_the_weights_as_it_is_best_made_is_little() -> None:
    """get_ema_multi_avg_fn, which is recommended, and not a function for each weight."""
    line = CodeLine("train.py:12", 40, (), "ema.update_parameters", "torch._foreach_lerp_")
    each = dataclasses.replace(line, inner="ema.lerp_")
    for one, other_s, severity in (
        (line, 0.03, "info"),
        (line, 0.1, "critical"),
        (each, 0.03, "warning"),
    ):
        assert finding(judge(other(one, other_s=other_s)), "other_code").severity == severity


@pytest.mark.parametrize(
    ("called", "inner", "other_s", "severity"),
    [
        ("model().pow().mean", "model().pow().mean", 0.015, "info"),
        ("model().pow().mean", "model().pow().mean", 0.1, "critical"),
        ("frame.apply().sum", "pandas.core.frame.apply", 0.015, "warning"),
        ("score", "train.score", 0.015, "warning"),
    ],
)
def test_a_loss_that_the_loop_computes_with_operators_is_no_fault_of_a_light_step(
    called: str, inner: str, other_s: float, severity: str
) -> None:
    line = CodeLine("train.py:14", 40, (), called, inner)
    found = finding(judge(other(line, other_s=other_s)), "other_code")
    assert found.severity == severity


def test_what_reinforcement_learning_plays_is_a_part_of_it() -> None:
    """A rollout of steps of an environment, whose lists are made for each; and neighbouring lines
    that nobody has a word for."""

    def told(*lines: CodeLine, other_s: float = 0.06) -> str:
        record = other(*lines, other_s=other_s)
        rank = record.ranks[0]
        header = dataclasses.replace(rank.header, loaders=())
        record = dataclasses.replace(record, ranks=(dataclasses.replace(rank, header=header),))
        return finding(judge(record), "other_code").severity

    play = CodeLine("ppo.py:14", 60, (), "env.step", "env.step")
    stack = CodeLine("ppo.py:30", 60, (), "torch.stack", "torch.stack")
    assert told(play) == "info" and told(play, other_s=1.0) == "warning"
    assert told(stack) != "info" and told(stack, other_s=0.02) == "info"  # nothing is played
    assert told(dataclasses.replace(play, count=20), stack) == "info"
    drawn = CodeLine("train.py:30", 60, (), "torch.randn", "torch.randn")  # stands for data
    assert told(drawn) == "info" and told(drawn, other_s=1.0) == "warning"
    odd = [CodeLine(f"a.py:{line}", 20, (), f"self.f{line}", f"self.f{line}") for line in (7, 8, 9)]
    assert told(*odd) == "info" and told(dataclasses.replace(odd[0], count=90)) != "info"


@pytest.mark.parametrize("called", ["loss.backward", "opt.zero_grad", "Trainer().train", "pl.fit"])
def test_the_step_itself_is_no_other_code(called: str) -> None:
    """Also where a library's loop, which the script calls in one line, does more than the step."""
    line = CodeLine("train.py:8", 70, (), called, "data.to")
    assert "other_code" not in kinds(judge(other(line)))


PLOTS = ThreadLooks(StackLooks(60, (CodeLine("plot.py:8", 40, ("train.py:5",), "sum"),)), 0.4)


def thread(cpu_share: float, ready: float, threads: ThreadLooks = PLOTS) -> RunRecord:
    """A step of 0.1 s whose main thread is on a core for so much of it, and lacks one so often."""
    times = np.arange(0.0, 60.0, 0.5)
    row = {"time_s": times, "rank": 0, "role": 0, "pid": 100, "cpu_cores": cpu_share}
    waits = table(tables.CORE_WAITS, row | {"main_thread": ready, "threads": ready}, len(times))
    parts = {"forward_s": 0.03, "backward_s": 0.05, "optimizer_s": 0.015, "other_s": 0.005}
    header = {"other_threads": threads}
    found = run_on_cpu(header=header, cpu_s=0.1 * cpu_share, **parts)
    return dataclasses.replace(found, core_waits=waits)


def test_a_python_thread_next_to_the_training_takes_the_interpreters_lock() -> None:
    result = judge(thread(0.2, 0.1))
    found = finding(result, "python_thread")
    assert result.findings[0] == found and result.limit == "script"
    assert found.place is not None and str(found.place) in answer(result)
    assert found.share == pytest.approx(0.95 - 0.2 - 0.1, abs=0.03)


def test_the_line_at_which_a_thread_computes_is_named_not_the_one_at_which_it_waits() -> None:
    waits = CodeLine("up.py:8", 55, (), "self.queue.get", "waiter.acquire", "lock")
    code = StackLooks(100, (waits, CodeLine("up.py:9", 27, (), "json.dumps", "_iterencode")))
    found = finding(judge(thread(0.2, 0.1, ThreadLooks(code, 0.4, 1, 0.4))), "python_thread")
    assert str(found.place) == "up.py:9"


def off_core(calls: str, waits_for: str = "") -> RunRecord:
    """A step of 0.1 s, a fifth of it at one line of the script."""
    found = thread(0.5, 0.2)
    line = CodeLine("train.py:17", 50, (), calls, calls, waits_for)  # type: ignore[arg-type]
    first = found.ranks[0]
    steps = first.steps.copy()
    steps["forward_s"] = 0.015
    header = dataclasses.replace(first.header, other_code=StackLooks(100, (line,)))
    rank = dataclasses.replace(first, header=header, steps=steps)
    return dataclasses.replace(found, ranks=(rank,))


def test_the_interpreters_lock_is_waited_for_between_the_phases_too() -> None:
    found = finding(judge(off_core("torch.randn")), "python_thread")
    assert found.share == pytest.approx(1.0 - 0.5 - 0.2, abs=0.04)
    for calls, kind in (("queue.get", "lock"), ("subprocess.run", "")):
        found = finding(judge(off_core(calls, kind)), "python_thread")
        assert found.share == pytest.approx(0.8 - 0.5 - 0.2, abs=0.04)


@pytest.mark.parametrize(
    "healthy",
    [
        thread(0.9, 0.05),  # the training computes all the time
        thread(0.2, 0.75),  # … or other programs have its core
        thread(0.2, 0.1, ThreadLooks(PLOTS.code, 0.02)),  # the thread mostly waits
        thread(0.2, 0.1, ThreadLooks()),
    ],
)
def test_a_thread_that_takes_nothing_is_not_blamed(healthy: RunRecord) -> None:
    assert "python_thread" not in kinds(judge(healthy))


def test_a_pool_within_a_worker_is_neither_a_lock_nor_a_librarys_threads() -> None:
    pool = (("pool.map", "waiter.acquire"), ("ThreadPoolExecutor", "lock.acquire"))
    waits = [CodeLine("data.py:24", 40, (), *each, "lock") for each in pool]
    looks = StackLooks(100, (*waits, CodeLine("data.py:24", 2, (), "list", "self.wait", "lock")))
    assert waits_for(looks)[0] == "" and has_own_threads(looks)
    found = costliest(looks)
    assert found is not None
    habit = habit_of_samples(found.names)
    assert habit is not None and "threads or processes" in habit.what
    held = StackLooks(100, (CodeLine("data.py:9", 40, (), "LOCK.acquire", "LOCK.acquire", "lock"),))
    assert waits_for(held)[0] == "lock" and not has_own_threads(held)


def test_a_line_that_several_lines_of_the_loop_call_is_named_once() -> None:
    """A helper that logs, called twice in a step."""
    parts = [
        CodeLine("log.py:9", 20, (caller,), "inspect.stack", "os.stat")
        for caller in ("train.py:16", "train.py:18")
    ]
    line = costliest(StackLooks(80, (*parts, CodeLine("train.py:24", 22, (), "torch.randn"))))
    assert line is not None and (str(line), line.count) == ("log.py:9", 40)
    once = costliest(StackLooks(80, (parts[0], CodeLine("train.py:24", 22, (), "torch.randn"))))
    assert once is not None and str(once) == "train.py:24"


def test_lines_that_have_most_only_together_are_named_together() -> None:
    """Half of all looks is what is asked for: 49 at one line are too few, 80 at three are not."""
    lines = [
        CodeLine(f"data.py:{line}", count, ("data.py:24",), "re.sub")
        for line, count in ((14, 49), (13, 16), (15, 15))
    ]
    looks = StackLooks(100, (*lines, CodeLine("data.py:25", 20, (), "torch.tensor")))
    together, alone = costliest(looks, 50), costliest(looks, 40)
    assert together is not None and (str(together), together.count) == ("data.py:13-15", 80)
    assert alone is not None and str(alone) == "data.py:14"


def spread(*lines: int, count: int = 8, first: int = 0) -> list[CodeLine]:
    """Lines of the training loop, each with so many looks, and ``first`` more at the first."""
    more = dict.fromkeys(lines, count)
    more[lines[0]] += first
    return [CodeLine(f"train.py:{n}", more[n], (), f"words{n}.update") for n in lines]


def test_the_cost_of_neighbouring_lines_of_the_loop_is_added_up() -> None:
    parts = spread(14, 15, 16, 18, 20, 21)
    found = finding(judge(other(*parts, CodeLine("train.py:31", 9, (), "print"))), "other_code")
    assert found.title.startswith("train.py:14-21 runs Python code for ")
    assert found.share == pytest.approx(0.5 * 48 / 57, abs=0.02)
    # What nobody can tell to be one thing has no name of one line, nor what that would ask for.
    assert "words" not in found.title and found.place is not None
    assert answer(judge(other(*parts))).count("train.py:") == 1


def test_a_part_of_the_line_itself_is_not_named() -> None:
    counts = CodeLine("train.py:9", 60, ("train.py:9",), "", "__main__.<genexpr>")
    assert "genexpr" not in finding(judge(other(counts)), "other_code").title


def test_what_most_of_several_lines_do_is_told() -> None:
    names = ("json.dumps", "log.write", "log.flush", "log.write")
    parts = [CodeLine(f"train.py:{10 + n}", 12, (), each) for n, each in enumerate(names)]
    assert "train.py:10-13 logs (`log.write`)" in finding(judge(other(*parts)), "other_code").title


@pytest.mark.parametrize(
    ("lines", "named"),
    [
        (spread(14, 15, 16, first=20), "train.py:14"),  # half of them are at one line
        (spread(14, 24, 34, 44, first=1), "train.py:14"),  # they are no neighbours
        # Lines with hardly any at the ends are not told with the others.
        ([*spread(14, 15, 16, count=30), *spread(12, 18, count=2)], "train.py:14-16"),
        # The step is between them.
        (
            [
                *spread(10, 11, 16, 17, first=1),
                CodeLine("train.py:13", 9, (), "F.mse_loss", "torch._C._nn.mse_loss"),
            ],
            "train.py:10",
        ),
    ],
)
def test_what_is_no_neighbour_is_not_added(lines: list[CodeLine], named: str) -> None:
    line = costliest(StackLooks(100, tuple(lines)))
    assert line is not None and str(line) == named


def test_lines_of_two_functions_are_no_neighbours() -> None:
    """Transforms that one line calls in turn: those of the costly one are told, and no other's."""
    called = ("train.py:37", "train.py:29")
    parts = [
        CodeLine("train.py:18", 40, called, "random.random", function="Noise.__call__"),
        CodeLine("train.py:19", 22, called, "", function="Noise.__call__"),
        CodeLine("train.py:22", 38, called, "a.astype", function="Normalize.__call__"),
    ]
    line = costliest(StackLooks(110, tuple(parts)), 55)
    assert line is not None and (str(line), line.count) == ("train.py:18-19", 62)
    # Of the loop itself: each has a third, and none more than half with its own function's.
    thirds = [dataclasses.replace(each, count=30, callers=()) for each in parts]
    line = costliest(StackLooks(110, tuple(thirds)))
    assert line is not None and str(line) == "train.py:18"
    one = [dataclasses.replace(each, function="main") for each in thirds]
    line = costliest(StackLooks(110, tuple(one)))
    assert line is not None and str(line) == "train.py:18-22"


def test_what_a_script_waits_for_has_a_word_of_its_own() -> None:
    def what(*names: str, waits_for: str = "lock") -> str:
        return habit_of(names, waits_for, has_loader=False).what

    assert what("conn.recv", "multiprocessing.connection._recv", waits_for="process") == (
        "waits for another process"
    )
    assert what("q.put", "lock.acquire") == "waits until a queue has room"
    assert what("list", "concurrent.futures._base.result_iterator").startswith("waits for a pool")
    assert what("Parallel", "joblib.parallel._retrieve").startswith("waits for a pool")
    assert what("lock.acquire", "lock.acquire") == "waits for a lock"


def test_a_transform_of_images_is_no_statistic() -> None:
    names = ("ndimage.rotate", "scipy.ndimage._interpolation.geometric_transform")
    habit = habit_of(names, "", has_loader=False)
    assert habit.what == "transforms images" and "num_workers" in habit.action
    assert habit_of(("metric.update",), "", has_loader=False).what == "computes statistics"
    assert habit_of(("logits.tolist",), "", has_loader=False).what.startswith("makes Python")


def test_a_file_that_is_gone_through_for_each_sample() -> None:
    habit = habit_of_samples(("enumerate",), "open(path)")
    assert habit is not None and "offsets" in habit.action
    whole = habit_of_samples(("csv.reader",), "csv.reader(open(path))")
    assert whole is not None and whole.what == "reads a whole table for each sample"


def test_a_line_that_calls_the_script_s_own_function_is_a_place_of_its_own() -> None:
    """env.step() next to what chooses the action."""
    step = [CodeLine(f"env.py:{n}", 22, ("train.py:23",), function="Env.step") for n in (12, 13)]
    chooses = [CodeLine(f"train.py:{n}", 30, (), "d.sample", function="<module>") for n in (21, 22)]
    line = costliest(StackLooks(120, (*step, *chooses)))
    assert line is not None and str(line) == "env.py:12-13" and line.count == 44
    own = [CodeLine("train.py:23", 44, (), "torch.stack", function="<module>")]
    together = costliest(StackLooks(120, (*own, *chooses)))
    assert together is not None and str(together) == "train.py:21-23"


def test_a_line_that_draws_is_told_to_close_its_figures_where_they_are_kept() -> None:
    line = CodeLine("train.py:13", 60, (), "plt.savefig", "PIL.Image.save")
    kept = GrowingVariable("pyplot", "train.py:11", FIGURES, 0, 13, 130)

    def action(*growing: GrowingVariable) -> str:
        record = other(line)
        (rank,) = record.ranks
        header = dataclasses.replace(rank.header, growing=growing)
        record = dataclasses.replace(record, ranks=(dataclasses.replace(rank, header=header),))
        return finding(judge(record), "other_code").fix.action

    assert "plt.close(fig) after it: pyplot keeps each figure that train.py:11" in action(kept)
    assert "plt.close" not in action()


# --- Python's garbage collector -------------------------------------------------------------------


def collected(each_s: float, *lines: CodeLine, at_s: float = 0.0) -> RunRecord:
    """A run whose garbage collector stops it for so long in each of 10 seconds."""
    record = other(*lines, looks=200)
    times = record.ranks[0].steps["end_s"]
    told = {"pauses": 3.0, "longest_s": 0.7 * each_s}
    every = np.linspace(times[20], times[-1], 10)
    events = tuple(Event(at_s or at, COLLECTIONS, 30, each_s, values=told) for at in every)
    first = dataclasses.replace(record.ranks[0], events=events)
    return dataclasses.replace(record, ranks=(first,))


def test_pauses_of_the_garbage_collector_are_told_with_their_share() -> None:
    """And not the line at which Python begins one: it makes objects as it should."""
    makes = CodeLine("tree.py:9", 120, ("train.py:20",), "Node", "__main__.__init__")
    record = collected(1.0, makes)
    result = judge(record)
    found = finding(result, "collector_pauses")
    seconds = float(record.ranks[0].steps["step_s"].sum())
    assert found.share == pytest.approx(10 / seconds, rel=0.15) and "30 pauses" in found.title
    assert "gc.disable()" in found.fix.action and "other_code" not in kinds(result)
    assert result.limit == "script" and "garbage collector" in answer(result)


def test_rare_pauses_and_those_before_the_training_are_none() -> None:
    assert "collector_pauses" not in kinds(judge(collected(0.05)))
    assert "collector_pauses" not in kinds(judge(collected(2.0, at_s=0.01)))


def test_collections_that_the_script_asks_for_are_told_at_its_line() -> None:
    asks = CodeLine("train.py:31", 120, (), "gc.collect", "gc.collect")
    result = judge(collected(1.0, asks))
    assert "collector_pauses" not in kinds(result)
    assert finding(result, "other_code").title.startswith("train.py:31 cleans up memory")


def test_a_line_that_computes_over_what_grows_is_told_so() -> None:
    line = CodeLine("log.py:8", 60, ("train.py:9",), "self.table[].mean", "np.isnan")
    grows = GrowingVariable("self.table", "log.py:9", "DataFrame", 6, 5697, 5000)
    record = run_on_cpu(
        other_s=0.1, header={"other_code": StackLooks(80, (line,)), "growing": (grows,)}
    )
    found = finding(judge(record), "other_code")
    assert "goes over all of the growing `self.table` (`self.table[].mean`)" in found.title
    assert "running sum" in found.fix.action
    another = dataclasses.replace(line, calls="self.table_of.mean")
    record = run_on_cpu(
        other_s=0.1, header={"other_code": StackLooks(80, (another,)), "growing": (grows,)}
    )
    assert "growing" not in finding(judge(record), "other_code").title


@pytest.mark.parametrize(
    ("calls", "over_all"),
    [
        ("all_logits.argmax", True),
        ("all_logits.append", False),
        ("all_logits.size", False),
        ("self.all_logits.argmax", False),
        ("all_logits().argmax", False),
    ],
)
def test_a_method_of_what_grows_goes_over_all_of_it(calls: str, over_all: bool) -> None:
    line = CodeLine("train.py:12", 60, (), calls, calls)
    grows = GrowingVariable("all_logits", "train.py:11", "tensor", 768, 119936, 900)
    record = run_on_cpu(
        other_s=0.1, header={"other_code": StackLooks(80, (line,)), "growing": (grows,)}
    )
    said = finding(judge(record), "other_code").title
    assert ("goes over all of the growing `all_logits`" in said) is over_all


def test_a_log_that_its_thread_cannot_write_in_time_is_no_lock() -> None:
    line = CodeLine("train.py:10", 60, (), "w.add_histogram", "waiter.acquire", "lock")
    found = finding(judge(other(line)), "other_code")
    assert "logs more than its thread can write (`w.add_histogram`)" in found.title
    assert "every 500 steps" in found.fix.action
    locks = dataclasses.replace(line, calls="self.share")
    assert "waits for a lock" in finding(judge(other(locks)), "other_code").title


def test_distributions_are_asked_for_many_states_at_once() -> None:
    line = CodeLine("train.py:19", 60, (), "torch.distributions.Categorical", "logits.logsumexp")
    found = finding(judge(other(line)), "other_code")
    assert "asks a distribution" in found.title and "validate_args" in found.fix.action
    assert "DataLoader" not in found.fix.action


@pytest.mark.parametrize(("over", "severity"), [("range(40)", "warning"), ("", "info")])
def test_a_loop_in_an_environment_is_worth_a_word_sooner(over: str, severity: str) -> None:
    line = CodeLine("env.py:9", 60, ("train.py:16",), "np.linalg.norm", "norm", over=over)
    looks = StackLooks(80, (line, CodeLine("train.py:16", 20, (), "env.step", "env.step")))
    record = run_on_cpu(
        other_s=0.08, header={"other_code": looks, "memories": ("buf",), "loaders": ()}
    )
    found = finding(judge(record), "other_code")
    assert 0.25 < (found.share or 0.0) < 0.5 and found.severity == severity


def test_lines_of_a_function_with_comprehensions_are_one_place_next_to_its_caller() -> None:
    inner = "Jitter.forward.<locals>.<listcomp>.<listcomp>"
    parts = (
        CodeLine("data.py:7", 48, ("data.py:7", "data.py:7", "data.py:12"), "max", function=inner),
        CodeLine("data.py:8", 40, ("data.py:12",), "torch.tensor", function="Jitter.forward"),
        CodeLine("data.py:12", 12, (), "self.t", function="Pics.__getitem__"),
    )
    found = costliest(StackLooks(100, parts))
    assert found is not None
    assert (str(found), found.count) == ("data.py:7-8", 88)
    # Of two functions that a line calls neither has most: it is the place.
    other = dataclasses.replace(parts[1], place="data.py:30", function="Crop.forward")
    calls = costliest(StackLooks(100, (parts[0], other, parts[2])))
    assert calls is not None
    assert str(calls) == "data.py:12"
