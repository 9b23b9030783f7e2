"""Lines of a script that cannot do what they are for, whatever it is given: a method that is named
and not called, an iterator that is gone over after its end, samples that all get the same random
numbers, a dropout that evaluations have, too, a Lightning step without a result, a schedule that is
never stepped. And aids of debugging that slow each step."""

from __future__ import annotations

import ast
import builtins
import re
from collections.abc import Iterator, Sequence
from typing import Final

from trainfit.findings.source_code import names_in
from trainfit.lint.imports import Source
from trainfit.lint.in_vain import lost_lines
from trainfit.lint.index import LOADER_NAME, PER_SAMPLE, assigned_calls, line_finding
from trainfit.lint.kept_results import kept_results
from trainfit.lint.no_effect import without_effect
from trainfit.results.findings import Finding, Severity

#: Methods that are only ever called: to name one alone does nothing.
_CALLED: Final = {
    *("backward", "cuda", "empty_cache", "eval", "set_epoch", "step", "synchronize", "train"),
    *("unscale_", "update", "wait_for_everyone", "zero_", "zero_grad"),
}
#: What makes iterators, which give each element once.
_ITERATORS: Final = {"iter", "map", "filter", "zip", "enumerate"}
_SCOPES: Final = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef, ast.Module)
#: The kind of what makes all samples of a data set get the same random numbers.
SAME_NUMBERS: Final = "same-random-numbers"
_SEEDS: Final = {"seed", "manual_seed", "seed_everything", "set_seed"}
#: Functions of libraries that seed torch, too.
_ALL_SEEDS: Final = {"seed_everything", "set_seed"}
_SEEDED_AGAIN: Final = "seeded-each-pass"
#: Samples over batches.
_PER_BATCH: Final = "samples-over-batches"
#: Kinds of mistakes with which a training does not learn what it is meant to.
SPOILS: Final = frozenset(
    (
        *("not-called", "iterator-used-up", "steps-after-loop", "parameter-rebound"),
        *(
            "step-without-result",
            "gradients-left-off",
            "gradients-never-zeroed",
            "model-each-epoch",
            *("shuffled-apart", "split-order"),
        ),
    )
)
#: Functions whose ``training`` is True where it is not given (that of alpha_dropout is False).
_DROPOUT: Final = re.compile(r"(?:^|\.)(?:F|functional)\.dropout(?:1d|2d|3d)?$")
_ALWAYS_DROPS: Final = "dropout-in-evaluation"
#: Layers that drop, by their class: one that is made in forward() is in training mode.
_DROPOUT_LAYER: Final = re.compile(r"(?:^|\.)(?:Feature)?(?:Alpha)?Dropout(?:1d|2d|3d)?$")
#: Schedules of PyTorch, and functions of transformers that make one.
_SCHEDULE: Final = re.compile(
    r"(?:^|\.)(?:(?:Step|MultiStep|Constant|Linear|Exponential|Polynomial|CosineAnnealing|Lambda"
    r"|Multiplicative|Cyclic|OneCycle|Sequential|Chained)(?:LR|Scheduler)|ReduceLROnPlateau"
    r"|CosineAnnealingWarmRestarts|get_scheduler|get_\w+_schedule(?:_with_\w+)?)$"
)
_IDLE_SCHEDULE: Final = "schedule-not-stepped"
_TURNED_PLATEAU: Final = "plateau-turned"
_RETRIED: Final = "retried-in-except"
_WARNINGS: Final = (
    *(SAME_NUMBERS, _ALWAYS_DROPS, "launches-blocked", "cudnn-off", _TURNED_PLATEAU, _RETRIED),
    *(_IDLE_SCHEDULE, _SEEDED_AGAIN, _PER_BATCH),
)
_BUILTINS: Final = frozenset(dir(builtins))
#: Words of what is to rise, and of what is to fall.
_LARGER_IS_BETTER: Final = {
    *("acc", "accuracy", "f1", "auc", "auroc", "iou", "miou", "psnr", "ssim", "bleu", "recall"),
    *("precision", "top1", "top5", "valacc", "testacc"),
}
_SMALLER_IS_BETTER: Final = {"loss", "err", "error", "neg", "nll"}


def mistakes(source: Source) -> Iterator[Finding]:
    """All of them in a file."""
    yield from uncalled(source)
    yield from _used_up(source)
    yield from _seeded(source)
    yield from _seeded_each_pass(source)
    yield from _hits_over_batches(source)
    yield from _dropped(source)
    yield from _without_result(source)
    yield from _debugging(source)
    yield from _turned_plateau(source)
    yield from _idle_schedules(source)
    yield from _retried(source)
    yield from lost_lines(source)
    yield from without_effect(source)
    yield from kept_results(source)


def uncalled(source: Source) -> Iterator[Finding]:
    """Statements of a file that name a method of these and do not call it."""
    for node in source.nodes:
        if not isinstance(node, ast.Expr) or not isinstance(node.value, ast.Attribute):
            continue
        if node.value.attr in _CALLED:
            text = source.text(node.value)
            yield _finding(
                source,
                node,
                "not-moved" if node.value.attr == "cuda" else "not-called",
                f"{text} is not called: a line without parentheses does nothing",
                "the line names the method and does not run it.",
                f"{text}()",
            )


def _used_up(source: Source) -> Iterator[Finding]:
    """``batches = map(…)`` before a loop over epochs in which a loop goes over it to its end."""
    around = {child: node for node in source.nodes for child in ast.iter_child_nodes(node)}
    for loop in source.nodes:
        if not isinstance(loop, ast.For) or not isinstance(loop.iter, ast.Name) or _leaves(loop):
            continue
        scope, loops = _surroundings(loop, around)
        made = list(_bindings(scope, loop.iter.id))
        if not loops or len(made) != 1 or not _is_iterator(made[0]):
            continue
        made_in, made_within = _surroundings(made[0], around)
        if made_in is not scope or made_within or made[0].lineno > loops[-1].lineno:
            continue
        if _leaves(loops[-1]):
            continue  # it may be a loop of one pass
        text = source.text(made[0].value)  # type: ignore[union-attr]
        yield _finding(
            source,
            loop,
            "iterator-used-up",
            f"{loop.iter.id} gives each element once: from the second pass of the loop at line "
            f"{loops[-1].lineno} on there is nothing in it, and nothing is trained",
            f"line {made[0].lineno} makes an iterator, which is at its end after one pass.",
            f"for … in {text}: in place of {loop.iter.id}, which begins at each pass",
        )


def _leaves(loop: ast.AST) -> bool:
    """May it end before its iterator does, so that the rest is for the next pass?"""
    return any(isinstance(node, ast.Break | ast.Return | ast.Yield) for node in ast.walk(loop))


def _surroundings(
    node: ast.AST, around: dict[ast.AST, ast.AST]
) -> tuple[ast.AST, list[ast.For | ast.While]]:
    """The function or file that a node is in, and the loops there, the innermost first."""
    loops: list[ast.For | ast.While] = []
    outer = around[node]
    while not isinstance(outer, _SCOPES):
        if isinstance(outer, ast.For | ast.While):
            loops.append(outer)
        outer = around[outer]
    return outer, loops


def _bindings(scope: ast.AST, name: str) -> Iterator[ast.stmt | ast.NamedExpr]:
    """What gives a variable its value."""
    for node in ast.walk(scope):
        if not isinstance(node, ast.stmt | ast.NamedExpr):
            continue
        targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
        outer = isinstance(node, ast.Global | ast.Nonlocal) and name in node.names
        if outer or any(name in names_in(target) for target in targets if target is not None):
            yield node


def _is_iterator(node: ast.AST) -> bool:
    if not isinstance(node, ast.Assign) or not all(
        isinstance(target, ast.Name) for target in node.targets
    ):
        return False  # ``one, two = (…)`` has what it gives
    made = node.value
    if isinstance(made, ast.GeneratorExp):
        return True
    return (
        isinstance(made, ast.Call)
        and isinstance(made.func, ast.Name)
        and made.func.id in _ITERATORS
        and len(made.args) > (made.func.id in ("map", "filter"))
    )


def _seeded(source: Source) -> Iterator[Finding]:
    """``np.random.seed(42)`` in the ``__getitem__`` of a data set, or in a ``worker_init_fn``."""
    begins = {
        node.value.id
        for node in source.nodes
        if isinstance(node, ast.keyword)
        and node.arg == "worker_init_fn"
        and isinstance(node.value, ast.Name)
    }
    for owner in source.nodes:
        if not isinstance(owner, ast.FunctionDef) or owner.name not in {*PER_SAMPLE, *begins}:
            continue
        for call in ast.walk(owner):
            if not isinstance(call, ast.Call) or len(call.args) != 1:
                continue
            name = getattr(call.func, "attr", None) or getattr(call.func, "id", None)
            seed = call.args[0]
            if name not in _SEEDS or not isinstance(seed, ast.Constant):
                continue
            if type(seed.value) is int and owner.name in begins:
                yield _finding(
                    source,
                    call,
                    SAME_NUMBERS,
                    f"{source.text(call)} in {owner.name}: all workers draw the same random "
                    "numbers, and the same in every epoch",
                    "workers have seeds of their own, which the line replaces by one for all.",
                    "without the line: PyTorch seeds torch, random and NumPy in each worker, from "
                    "torch.manual_seed() of the script; for other libraries "
                    "torch.initial_seed() % 2**32",
                )
            elif type(seed.value) is int:
                yield _finding(
                    source,
                    call,
                    SAME_NUMBERS,
                    f"{source.short(call)} in {owner.name}: every sample gets the same random "
                    "numbers, in every epoch",
                    "what is drawn after it (crops, noise, masks) is the same for all samples.",
                    "seed once at the start of the script (workers get seeds of their own); for "
                    "numbers that are a sample's own: np.random.default_rng([seed, index])",
                )


def _hits_over_batches(source: Source) -> Iterator[Finding]:
    """``right += (predicted == y).sum()`` of each batch, and then ``right / len(loader)``."""
    around = {child: node for node in source.nodes for child in ast.iter_child_nodes(node)}
    made = [
        (line, call)
        for line, call in assigned_calls(source.nodes)
        if ast.unparse(call.func).rpartition(".")[2] == "DataLoader"
    ]
    several = {
        target.id
        for line, call in made
        if _makes_batches(call)
        for target in line.targets
        if isinstance(target, ast.Name)
    }
    # Of a function's own argument it is not known which of them it is.
    all_do = all(_makes_batches(call) for _, call in made)
    hits: set[tuple[ast.AST, str, str]] = set()
    for line in source.nodes:
        if not isinstance(line, ast.AugAssign) or not isinstance(line.op, ast.Add):
            continue
        scope, loops = _surroundings(line, around)
        over = _gone_over(loops[0]) if loops else None
        if over is None or not isinstance(line.target, ast.Name) or not _counts_hits(line.value):
            continue
        if over in several or (all_do and LOADER_NAME.search(over)):
            hits.add((scope, line.target.id, over))
    for share in source.nodes:
        if not isinstance(share, ast.BinOp) or not isinstance(share.op, ast.Div):
            continue
        scope, _ = _surroundings(share, around)
        by = share.right
        if not isinstance(by, ast.Call) or ast.unparse(by.func) != "len" or len(by.args) != 1:
            continue
        names = set(names_in(share.left))
        over = ast.unparse(by.args[0])
        if len(names) == 1 and (scope, name := names.pop(), over) in hits:
            yield _finding(
                source,
                share,
                _PER_BATCH,
                f"{source.text(share)}: samples are divided by the number of batches",
                f"{name} counts samples, len({over}) batches: an accuracy above 1, by up to the "
                "batch size.",
                f"{ast.unparse(share.left)} / len({over}.dataset)",
            )


def _makes_batches(call: ast.Call) -> bool:
    """Is a DataLoader told to give more than one sample at once?"""
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in named or {"batch_sampler", "sampler"} & named.keys():
        return False
    size = named.get("batch_size", call.args[1] if len(call.args) > 1 else None)
    return size is not None and not (isinstance(size, ast.Constant) and size.value in (1, None))


def _gone_over(loop: ast.AST) -> str | None:
    """The name of what a loop goes over, also through ``enumerate``; ``None``: it has none."""
    over = loop.iter if isinstance(loop, ast.For) else None
    while isinstance(over, ast.Call) and over.args:
        over = over.args[0]
    return over.id if isinstance(over, ast.Name) else None


def _counts_hits(value: ast.expr) -> bool:
    """Is it the number of elements that are equal?"""
    nodes = list(ast.walk(value))
    is_equal = any(
        (isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.Eq))
        or (isinstance(node, ast.Attribute) and node.attr == "eq")
        for node in nodes
    )
    is_sum = any(isinstance(node, ast.Attribute) and node.attr == "sum" for node in nodes)
    is_share = any(isinstance(node, ast.BinOp | ast.IfExp) for node in nodes)
    return is_equal and is_sum and not is_share


def _seeded_each_pass(source: Source) -> Iterator[Finding]:
    """``torch.manual_seed(0)`` in a loop that trains, of a model that is made before it."""
    around = {child: node for node in source.nodes for child in ast.iter_child_nodes(node)}
    for call in source.nodes:
        if not isinstance(call, ast.Call) or len(call.args) != 1:
            continue
        path = ast.unparse(call.func)
        is_torchs = path in ("torch.manual_seed", "manual_seed")
        if not is_torchs and path.rpartition(".")[2] not in _ALL_SEEDS:
            continue
        if not isinstance(call.args[0], ast.Constant):
            continue
        scope, loops = _surroundings(call, around)
        within = loops[0] if loops else scope
        if not loops and isinstance(scope, ast.FunctionDef):
            loops = _loops_that_call(source, scope.name)
        if not loops or _is_apart(call, within, around):
            continue
        names = {
            node.func.attr
            for node in ast.walk(within)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        }
        # A model that is made in the loop is another one: one fold after another.
        if "backward" not in names or names & {"parameters", "from_pretrained"}:
            continue
        text = source.text(call)
        yield _finding(
            source,
            call,
            _SEEDED_AGAIN,
            f"{text} in the loop at line {loops[0].lineno}: each pass shuffles and draws as the "
            "first did",
            "from this line on all random numbers are those of the pass before: the order of the "
            "data, augmentation, dropout, noise.",
            "seed once, before the loop; for something that is to be drawn alike each time: "
            "with torch.random.fork_rng(): around it, or a generator of its own",
        )


def _loops_that_call(source: Source, name: str) -> list[ast.For | ast.While]:
    """Loops of a file over calls of a function, by its own name."""
    return [
        loop
        for loop in source.nodes
        if isinstance(loop, ast.For | ast.While)
        and any(
            isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name
            for call in ast.walk(loop)
        )
    ]


def _is_apart(call: ast.AST, outer: ast.AST, around: dict[ast.AST, ast.AST]) -> bool:
    """Is it in a branch of a loop or a function, or in a block that keeps random numbers apart?"""
    node: ast.AST = call
    while node is not outer:
        node = around[node]
        if isinstance(node, ast.If | ast.With | ast.Try):
            return True
    return False


def _dropped(source: Source) -> Iterator[Finding]:
    """``F.dropout(x, 0.5)`` in a ``forward``, whatever the module's mode is."""
    for owner in source.nodes:
        if not isinstance(owner, ast.FunctionDef) or owner.name != "forward":
            continue
        nodes = list(ast.walk(owner))
        if not owner.args.args or any(getattr(node, "attr", "") == "training" for node in nodes):
            continue  # it looks at its mode
        for made in _made_to_drop(nodes):
            text = source.text(made)
            yield _finding(
                source,
                made,
                _ALWAYS_DROPS,
                f"{text} drops in evaluations, too: model.eval() does not reach a layer that "
                "forward makes",
                "a layer begins in training mode, and a new one is made in each call.",
                "self.drop = nn.Dropout(p) in __init__, and self.drop(x) in forward",
            )
        for call in nodes:
            if not isinstance(call, ast.Call) or len(call.args) > 2:
                continue
            if any(keyword.arg in ("training", None) for keyword in call.keywords):
                continue
            if _DROPOUT.search(ast.unparse(call.func)):
                text = source.text(call)
                mode = f"{owner.args.args[0].arg}.training"
                yield _finding(
                    source,
                    call,
                    _ALWAYS_DROPS,
                    f"{text} drops in evaluations, too: model.eval() does not reach it",
                    "the function's training is True where it is not given, whatever the module's "
                    "mode is.",
                    f"{text[:-1].rstrip(' ,')}, training={mode}), or nn.Dropout as a module",
                )


def _made_to_drop(nodes: Sequence[ast.AST]) -> Iterator[ast.Call]:
    """``nn.Dropout(0.5)(x)``, or with a name of its own in between."""
    layers = {
        node.targets[0].id: node.value
        for node in nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and _is_dropout_layer(node.value)
    }
    for call in nodes:
        if not isinstance(call, ast.Call):
            continue
        if _is_dropout_layer(call.func) or (
            isinstance(call.func, ast.Name) and call.func.id in layers
        ):
            yield call


def _is_dropout_layer(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) and bool(_DROPOUT_LAYER.search(ast.unparse(node.func)))


def _idle_schedules(source: Source) -> Iterator[Finding]:
    """A schedule that gets a name, which no line of the file uses."""
    steps = (
        isinstance(device_node, ast.Attribute) and device_node.attr == "step"
        for device_node in source.nodes
    )
    if not any(steps):
        return  # another file trains
    used = {
        device_node.id
        for device_node in source.nodes
        if isinstance(device_node, ast.Name) and not isinstance(device_node.ctx, ast.Store)
    }
    # What reads names by themselves, or gives them to other files.
    if used & {"locals", "globals", "vars", "__all__"}:
        return
    for node, call in assigned_calls(source.nodes):
        target, made = node.targets[0], ast.unparse(call.func)
        if not isinstance(target, ast.Name) or target.id in used or not _SCHEDULE.search(made):
            continue
        name = made.rpartition(".")[2]
        yield _finding(
            source,
            node,
            _IDLE_SCHEDULE,
            f"{target.id} is made and never stepped: the learning rate stays as {name} begins",
            "no line uses the schedule: it changes the rate when its step() is called.",
            f"{target.id}.step() after each optimizer.step(), or at each epoch's end, as its "
            "length counts",
        )


def _without_result(source: Source) -> Iterator[Finding]:
    """A ``training_step`` of a LightningModule that returns nothing."""
    for owner in source.nodes:
        if not isinstance(owner, ast.ClassDef):
            continue
        if not any(ast.unparse(base).endswith("LightningModule") for base in owner.bases):
            continue
        words = {getattr(each, "attr", "") for each in ast.walk(owner)}
        if words & {"automatic_optimization", "manual_backward"}:
            continue
        for method in owner.body:
            if not isinstance(method, ast.FunctionDef) or method.name != "training_step":
                continue
            inside = list(ast.walk(method))
            gives = (ast.Return, ast.Yield, ast.Raise)
            if any(isinstance(each, gives) for each in inside):
                continue
            yield _finding(
                source,
                method,
                "step-without-result",
                f"{owner.name}.training_step returns nothing: Lightning skips the backward pass "
                "and the step, and nothing is learned",
                "the loss is computed and not given back.",
                "return loss, at its end",
            )


def _debugging(source: Source) -> Iterator[Finding]:
    """``os.environ["CUDA_LAUNCH_BLOCKING"] = "1"`` and cuDNN switched off, at a file's top."""
    for node in source.tree.body:
        if not isinstance(node, ast.Assign) or not isinstance(node.value, ast.Constant):
            continue
        target, text = ast.unparse(node.targets[0]), source.text(node)
        if "CUDA_LAUNCH_BLOCKING" in target and node.value.value == "1":
            yield _finding(
                source,
                node,
                "launches-blocked",
                f"{text} makes the CPU wait for each kernel: steps of many small ones are slower "
                "by far",
                "it is for finding the line of a CUDA error; each launch returns when its kernel "
                "is done, and the GPU idles until the next.",
                "remove the line; CUDA_LAUNCH_BLOCKING=1 before the command, when it is needed",
            )
        if target.endswith("backends.cudnn.enabled") and node.value.value is False:
            yield _finding(
                source,
                node,
                "cudnn-off",
                f"{text} switches to PyTorch's own kernels from cuDNN's: convolutions and "
                "recurrent layers are slower, and need more memory",
                "it is a way around an error of cuDNN, for all of the script.",
                "remove the line; where one part needs it: with "
                "torch.backends.cudnn.flags(enabled=False):",
            )


def _turned_plateau(source: Source) -> Iterator[Finding]:
    """``scheduler.step(val_acc)`` of a ReduceLROnPlateau that waits for what gets no smaller."""
    made: dict[str, list[ast.Call]] = {}
    for line, value in assigned_calls(source.nodes):
        made.setdefault(ast.unparse(line.targets[0]), []).append(value)
    for call in source.nodes:
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
            continue
        schedules = made.get(ast.unparse(call.func.value), [])
        if call.func.attr != "step" or len(call.args) != 1 or len(schedules) != 1:
            continue
        measure = call.args[0]
        words = set(re.split(r"[^a-z0-9]+", ast.unparse(measure).lower().replace("_", " ")))
        is_named = isinstance(measure, ast.Name | ast.Attribute | ast.Subscript)
        if not is_named or not words & _LARGER_IS_BETTER or words & _SMALLER_IS_BETTER:
            continue
        if not _waits_for_least(schedules[0]):
            continue
        text = source.text(call)
        yield _finding(
            source,
            call,
            _TURNED_PLATEAU,
            f"{text}: ReduceLROnPlateau lowers the learning rate while {source.text(measure)} "
            "rises",
            f"line {schedules[0].lineno} makes it with mode='min', the default, which is for "
            "what is to fall, as a loss.",
            "ReduceLROnPlateau(optimizer, mode='max', …), or step(val_loss)",
        )


def _retried(source: Source) -> Iterator[Finding]:
    """A step that is tried in the handler of its own out-of-memory error."""
    for node in source.nodes:
        if not isinstance(node, ast.Try):
            continue
        tried = {name for line in node.body for name, _ in _own_calls(line)}
        for handler in node.handlers:
            kind = ast.unparse(handler.type) if handler.type is not None else ""
            is_told = "out of memory" in " ".join(map(ast.unparse, handler.body))
            if "OutOfMemory" not in kind and not (kind.endswith("RuntimeError") and is_told):
                continue
            again = [
                call for line in handler.body for name, call in _own_calls(line) if name in tried
            ]
            if again:
                yield _finding(
                    source,
                    again[0],
                    _RETRIED,
                    f"{source.short(again[0])} is tried while the memory of the failed step is "
                    "still in use",
                    "in an except block the exception holds the frames that failed, with their "
                    "outputs and graphs; torch.cuda.empty_cache() cannot free those.",
                    "note it in the except block (failed = True), and try it after the block",
                )


def _own_calls(line: ast.stmt) -> Iterator[tuple[str, ast.Call]]:
    """Calls of functions by a name of the script's own, as ``step(x, y)`` or ``model(x)``."""
    calls = (node for node in ast.walk(line) if isinstance(node, ast.Call))
    for call in calls:
        if isinstance(call.func, ast.Name) and call.func.id not in _BUILTINS:
            yield call.func.id, call


def _waits_for_least(made: ast.Call) -> bool:
    """Is it a ReduceLROnPlateau in the mode of losses?"""
    if not ast.unparse(made.func).endswith("ReduceLROnPlateau"):
        return False
    if any(keyword.arg is None for keyword in made.keywords):
        return False
    modes = [keyword.value for keyword in made.keywords if keyword.arg == "mode"] + made.args[1:2]
    return all(isinstance(mode, ast.Constant) and mode.value == "min" for mode in modes)


def _finding(
    source: Source, node: ast.stmt | ast.expr, kind: str, title: str, cause: str, fix: str
) -> Finding:
    severity: Severity = "warning" if kind in _WARNINGS else "critical"
    return line_finding(source, node, kind, title, cause, fix, severity)
