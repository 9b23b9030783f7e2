"""Lines of which the training takes no notice, or other than they are meant: a setting of an
optimizer that is none, the mode of one module, a scaler that is new in each step, batches that are
kept and given again, gradients that nobody sets to zero, a file that is read for each sample, a
batch size that nobody gave."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from typing import Final

from trainfit.findings.source_code import names_in
from trainfit.lint.imports import Source
from trainfit.lint.index import (
    LOADER_NAME,
    PER_SAMPLE,
    assigned_calls,
    assignments,
    line_finding,
    method_of,
    path_of,
)
from trainfit.results.findings import Finding

#: Constructors of optimizers, by PyTorch's names and libraries'.
_OPTIMIZER: Final = re.compile(
    r"(?:^|\.)(?:SGD|ASGD|Adam\w*|NAdam|RAdam|RMSprop|Adagrad|Adadelta|Rprop|Lion|LAMB|Adafactor)$"
)
#: What the groups of an optimizer have, and its own attributes are none.
_SETTINGS: Final = {"lr", "learning_rate", "weight_decay", "momentum"}
#: Functions that read a whole file, and arguments with which they do not.
_READS_WHOLE: Final = re.compile(
    r"(?:^|\.)(?:np|numpy|torch|pd|pandas|json|pickle|yaml|joblib|sio|scipy\.io)\."
    r"(?:load|safe_load|loadtxt|genfromtxt|loadmat|read_csv|read_excel|read_parquet|read_json"
    r"|read_pickle|read_table|read_feather)$"
)
_LAZY: Final = {"mmap_mode", "mmap", "nrows", "skiprows", "usecols", "chunksize", "iterator"}
#: Contexts of PyTorch's that change nothing until they are entered.
_CONTEXTS: Final = {"no_grad", "inference_mode", "enable_grad", "autocast"}
#: Methods with which a new model is not one that has learned nothing.
_RESTORES: Final = {"load_state_dict", "from_pretrained", "load"}
#: What modules are asked, and other things with a ``training`` of their own are not (settings,
#: environments of reinforcement learning).
_OF_MODULES: Final = {"parameters", "named_parameters", "modules", "state_dict", "cuda", "to"}

#: Other spellings of ``requires_grad``.
_MISSPELT: Final = {
    *("require_grad", "required_grad", "requires_grads", "requires_gradient", "require_grads"),
    *("requires_gradients", "requiresgrad", "require_gradient"),
}


def without_effect(source: Source) -> Iterator[Finding]:
    """All of them in a file."""
    made = _made(source)
    if any(each.endswith("DataParallel") for each in _called(source)):
        yield from _lost_in_replicas(source)
    for node in source.nodes:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            yield from _setting(source, node, made)
            yield from _mode(source, node, made)
            yield from _misspelt(source, node)
        elif isinstance(node, ast.Call):
            yield from _cycled(source, node, made)
        elif isinstance(node, ast.For | ast.While):
            yield from _new_scaler(source, node)
            yield from _adding_up(source, node)
            yield from _made_each_epoch(source, node)
            yield from _of_one_sample(source, node)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _not_entered(source, node)
        elif isinstance(node, ast.FunctionDef) and node.name in PER_SAMPLE:
            yield from _read_again(source, node)
            yield from _cached_in_worker(source, node)


def _made(source: Source) -> dict[str, list[str]]:
    """The functions whose results a variable or attribute has, by its path."""
    found: dict[str, list[str]] = {}
    for line, call in assigned_calls(source.nodes):
        for target in line.targets:
            found.setdefault(path_of(target), []).append(path_of(call.func))
    return found


def _called(source: Source) -> set[str]:
    """Functions that are called, but DistributedDataParallel."""
    names = {path_of(node.func) for node in source.nodes if isinstance(node, ast.Call)}
    return {name for name in names if not name.endswith("DistributedDataParallel")}


def _lost_in_replicas(source: Source) -> Iterator[Finding]:
    """``self.steps += 1`` in the ``forward`` of a module that DataParallel runs copies of."""
    for owner in source.nodes:
        if not isinstance(owner, ast.ClassDef):
            continue
        buffers = {
            call.args[0].value
            for call in ast.walk(owner)
            if isinstance(call, ast.Call)
            and method_of(call) == "register_buffer"
            and call.args
            and isinstance(call.args[0], ast.Constant)
        }
        forward = next(
            (each for each in owner.body if getattr(each, "name", "") == "forward"), None
        )
        for line in ast.walk(forward) if isinstance(forward, ast.FunctionDef) else ():
            name = _own_state(line)
            if not name or name in buffers:
                continue
            assert isinstance(line, ast.stmt)
            yield line_finding(
                source,
                line,
                "lost-in-replica",
                f"self.{name} is as before after each call: DataParallel runs forward() on copies "
                "of the module, one for each GPU, which it makes for the call",
                "what a copy sets is an attribute of the copy; on one GPU there is no copy.",
                f"a state that forward() is given and gives back; a counter as "
                f'self.register_buffer("{name}", torch.zeros(())) with self.{name}.add_(1), which '
                "the copy on the first GPU shares; or DistributedDataParallel",
                "warning",
            )
            break


def _own_state(line: ast.AST) -> str:
    """The attribute that a line computes of its value before; empty: none."""
    if isinstance(line, ast.AugAssign):
        path = path_of(line.target)
        return path.removeprefix("self.") if path.count(".") == 1 and path[:5] == "self." else ""
    if not isinstance(line, ast.Assign):
        return ""
    read = {path_of(node) for node in ast.walk(line.value) if isinstance(node, ast.Attribute)}
    for attribute in ast.walk(line.targets[0]):
        path = path_of(attribute) if isinstance(attribute, ast.Attribute) else ""
        if path.startswith("self.") and path.count(".") == 1 and path in read:
            return path.removeprefix("self.")
    return ""


def _setting(source: Source, node: ast.Assign, made: dict[str, list[str]]) -> Iterator[Finding]:
    """``optimizer.lr = 0.01``, ``optimizer.defaults["lr"] = 0.01``."""
    target = node.targets[0]
    if isinstance(target, ast.Subscript) and path_of(target.value).endswith(".defaults"):
        owner, key = path_of(target.value).removesuffix(".defaults"), target.slice
        name = key.value if isinstance(key, ast.Constant) else None
    elif isinstance(target, ast.Attribute):
        owner, name = path_of(target.value), target.attr
    else:
        return
    if name not in _SETTINGS or not any(map(_OPTIMIZER.search, made.get(owner, ()))):
        return
    own = "lr" if name == "learning_rate" else name
    yield line_finding(
        source,
        node,
        "optimizer-attribute",
        f"{source.short(node)} has no effect: the optimizer's {own} stays as it is",
        "an optimizer reads the settings of its groups; this sets an attribute that nothing reads.",
        f"for group in {owner}.param_groups: group[{own!r}] = {source.text(node.value)}",
        "warning",
    )


def _misspelt(source: Source, node: ast.Assign) -> Iterator[Finding]:
    """``parameter.required_grad = False``."""
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Attribute) or target.attr not in _MISSPELT:
        return
    if not isinstance(value, ast.Constant) or not isinstance(value.value, bool):
        return
    does = "freezes nothing" if not value.value else "asks for no gradient"
    right = f"{source.text(target.value)}.requires_grad = {source.text(value)}"
    yield line_finding(
        source,
        node,
        "flag-misspelt",
        f"{source.short(node)} {does}: the flag is called requires_grad",
        "a tensor accepts any attribute, and nothing reads this one.",
        right,
        "warning",
    )


def _mode(source: Source, node: ast.Assign, made: dict[str, list[str]]) -> Iterator[Finding]:
    """``model.training = False``."""
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Attribute) or target.attr != "training":
        return
    owner = path_of(target.value)
    if not isinstance(value, ast.Constant) or not isinstance(value.value, bool) or not owner:
        return
    loops = [device_node for device_node in source.nodes if isinstance(device_node, ast.For)]
    each_of_many = {name for loop in loops for name in names_in(loop.target)}
    is_layer = any(re.search(r"Dropout|Norm", each) for each in made.get(owner, ()))
    if owner.split(".")[0] in ("self", "cls") or owner in each_of_many or is_layer:
        return
    called = _called(source)
    if owner not in called and not any(f"{owner}.{each}" in called for each in _OF_MODULES):
        return
    call = f"{owner}.{'train' if value.value else 'eval'}()"
    yield line_finding(
        source,
        node,
        "mode-of-one-module",
        f"{source.text(node)} is the mode of the outermost module alone: dropout and BatchNorm "
        "within it stay in theirs",
        "each module has a flag of its own; train() and eval() set those of all modules within.",
        call,
        "warning",
    )


def _cycled(source: Source, call: ast.Call, made: dict[str, list[str]]) -> Iterator[Finding]:
    """``itertools.cycle(loader)``."""
    if path_of(call.func) not in ("cycle", "itertools.cycle") or len(call.args) != 1:
        return
    loader = path_of(call.args[0])
    is_loader = any(each.endswith("DataLoader") for each in made.get(loader, ()))
    if not is_loader and not LOADER_NAME.search(loader):
        return
    yield line_finding(
        source,
        call,
        "loader-cycled",
        f"{source.text(call)} keeps all batches of the first pass in memory, and gives these same "
        "batches from then on",
        "itertools.cycle saves what it is given: memory grows by the whole data set, and nothing "
        "is shuffled or augmented another time.",
        f"def endless(loader): while True: yield from loader; and endless({loader})",
        "warning",
    )


def _new_scaler(source: Source, loop: ast.For | ast.While) -> Iterator[Finding]:
    """``scaler = GradScaler()`` in the loop over batches."""
    for line, made in assigned_calls(loop.body):
        name = path_of(line.targets[0])
        if not path_of(made.func).endswith("GradScaler") or not name:
            continue
        used = {
            method_of(call)
            for call in _calls_of(loop.body)
            if isinstance(call.func, ast.Attribute) and path_of(call.func.value) == name
        }
        if "step" in used:
            yield line_finding(
                source,
                line,
                "scaler-remade",
                "A new GradScaler is made for each step: its scale begins at 65536 each time",
                "the scale is found over many steps, halved by each that overflows; a new one "
                "leaves out all steps whose gradients overflow at its first.",
                f"{source.text(line)} once, before the loop",
                "warning",
            )


def _calls_of(body: list[ast.stmt]) -> Iterator[ast.Call]:
    """Calls in these lines, those of loops within left out."""
    waiting: list[ast.AST] = list(body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.For | ast.While | ast.FunctionDef | ast.ClassDef):
            continue
        if isinstance(node, ast.Call):
            yield node
        waiting += ast.iter_child_nodes(node)


def _not_entered(source: Source, node: ast.Expr) -> Iterator[Finding]:
    """``torch.no_grad()`` as a line."""
    assert isinstance(node.value, ast.Call)
    name = path_of(node.value.func).rpartition(".")
    if name[2] not in _CONTEXTS or not (name[0].startswith("torch") or name[0] == ""):
        return
    text = source.text(node.value)
    yield line_finding(
        source,
        node,
        "context-not-entered",
        f"{text} as a line has no effect: nothing runs in it",
        "it makes a context, which begins with a with statement alone.",
        f"with {text}: and what is meant to run so indented below it",
    )


def _made_each_epoch(source: Source, loop: ast.For | ast.While) -> Iterator[Finding]:
    """``optimizer = Adam(model.parameters())`` in a loop over epochs, or in the function of one."""
    counter = path_of(loop.target) if isinstance(loop, ast.For) else ""
    if not re.search(r"(?i)epoch|^ep$", counter):
        return
    called = {path_of(call.func) for call in _calls_of(loop.body)}
    functions = [
        node for node in source.nodes if isinstance(node, ast.FunctionDef) and node.name in called
    ]
    for body in (loop.body, *(function.body for function in functions)):
        batches = [node for node in body if isinstance(node, ast.For) and _trains(node)]
        if any(method_of(call) in _RESTORES for call in _calls_of(body)):
            continue
        lines = [assignment for assignment in body if isinstance(assignment, ast.Assign)]
        new = {path_of(target) for assignment in lines for target in assignment.targets}
        for line in lines if batches else ():
            finding = _new_in_epoch(source, line, batches[0], new)
            if finding is not None:
                yield finding
                return


def _of_one_sample(source: Source, loop: ast.For | ast.While) -> Iterator[Finding]:
    """A loop that trains on ``DataLoader(data, shuffle=True)``."""
    if not isinstance(loop, ast.For) or not _trains(loop):
        return
    over = {path_of(each) for each in ast.walk(loop.iter)} - {""}
    for line, call in assigned_calls(source.nodes):
        given = {keyword.arg for keyword in call.keywords}
        is_loader = path_of(call.func).rpartition(".")[2] == "DataLoader"
        is_chosen = len(call.args) > 1 or given & {"batch_size", "batch_sampler", "sampler", None}
        if (
            is_loader
            and not is_chosen
            and "shuffle" in given
            and over & set(map(path_of, line.targets))
        ):
            yield line_finding(
                source,
                line,
                "batch-of-one",
                "Each step has one sample: the DataLoader is given no batch_size, which is 1 then",
                "a step of one sample leaves most of a GPU idle, and costs as many launches as one "
                "of many; BatchNorm has nothing to average over.",
                "DataLoader(…, batch_size=32): `trainfit plan` says which fits and is fastest",
                "warning",
            )
            return


def _cached_in_worker(source: Source, function: ast.FunctionDef) -> Iterator[Finding]:
    """``self.cache[index] = image`` in a data set that workers have copies of."""
    loaders = [
        call
        for call in source.nodes
        if isinstance(call, ast.Call) and path_of(call.func).rpartition(".")[2] == "DataLoader"
    ]
    workers = max(map(_workers_of, loaders), default=0)
    if not workers:
        return
    for line in ast.walk(function):
        target = line.targets[0] if isinstance(line, ast.Assign) else None
        if not isinstance(target, ast.Subscript) or not path_of(target.value).startswith("self."):
            continue
        name = path_of(target.value)
        read = any(
            isinstance(subscript, ast.Subscript)
            and isinstance(subscript.ctx, ast.Load)
            and path_of(subscript.value) == name
            for subscript in ast.walk(function)
        )
        if read and "cache" in name.lower():
            assert isinstance(line, ast.stmt)
            yield line_finding(
                source,
                line,
                "cache-in-worker",
                f"{name} is a cache of its own in each of {workers} workers: RAM for as many, and "
                "each begins empty in each epoch, with new workers"
                if not any(map(_persists, loaders))
                else f"{name} is a cache of its own in each of {workers} workers: RAM for as many",
                "a worker is a copy of the process: what __getitem__ stores stays in the worker.",
                f"fill {name} before the DataLoader is used, as one tensor (which workers share), "
                "or in a file that is read with mmap; persistent_workers=True keeps the workers",
                "warning",
            )
            return


def _workers_of(call: ast.Call) -> int:
    value = next((keyword.value for keyword in call.keywords if keyword.arg == "num_workers"), None)
    is_number = isinstance(value, ast.Constant) and isinstance(value.value, int)
    return value.value if is_number else 0  # type: ignore[union-attr]


def _persists(call: ast.Call) -> bool:
    value = next(
        (keyword.value for keyword in call.keywords if keyword.arg == "persistent_workers"), None
    )
    return value is not None and not (isinstance(value, ast.Constant) and not value.value)


def _trains(loop: ast.For) -> bool:
    return {"backward", "step"} <= {method_of(call) for call in _calls_of(loop.body)}


def _new_in_epoch(
    source: Source, line: ast.Assign, batches: ast.For, new: set[str]
) -> Finding | None:
    """An optimizer that a loop over batches steps, or its model."""
    name, value = path_of(line.targets[0]), line.value
    if not isinstance(value, ast.Call) or not _OPTIMIZER.search(path_of(value.func)):
        return None
    steps = {
        path_of(call.func.value)
        for call in _calls_of(batches.body)
        if isinstance(call.func, ast.Attribute) and call.func.attr == "step"
    }
    given = [path_of(each) for argument in value.args[:1] for each in ast.walk(argument)]
    if name not in steps:
        return None
    owner = next((each for each in given if each in new and each), "")
    if owner:
        return line_finding(
            source,
            line,
            "model-each-epoch",
            f"{owner} is new in each epoch, and so is its optimizer: what the epoch before has "
            "learned is gone",
            f"{owner} is made in the loop over epochs.",
            f"make {owner} and its optimizer once, before the loop over epochs",
        )
    is_plain = path_of(value.func).endswith("SGD") and not any(
        keyword.arg in ("momentum", None) for keyword in value.keywords
    )
    if is_plain or line.lineno > batches.lineno:
        return None
    return line_finding(
        source,
        line,
        "optimizer-each-epoch",
        f"{source.short(line)}: a new optimizer in each epoch, which knows nothing of the steps "
        "before",
        "its averages of gradients (momentum, Adam's) begin at 0 each time, and a schedule of its "
        "learning rate at its start.",
        "make the optimizer and its schedule once, before the loop over epochs",
        "warning",
    )


def _adding_up(source: Source, loop: ast.For | ast.While) -> Iterator[Finding]:
    """``w -= lr * w.grad`` after ``loss.backward()`` in a file that sets no gradient to zero."""
    if not any(method_of(call) == "backward" for call in _calls_of(loop.body)):
        return
    steps = [node for line in loop.body for node in ast.walk(line) if _is_own_step(node)]
    if not steps or any(map(_drops_gradients, source.nodes)):
        return
    line = steps[0]
    assert isinstance(line, ast.AugAssign)
    name = path_of(line.target).removesuffix(".data")
    if any(assignments(ast.walk(part), name) for part in loop.body):
        return  # another tensor in each pass
    yield line_finding(
        source,
        line,
        "gradients-never-zeroed",
        f"{source.short(line)} uses the sum of the gradients of all passes so far",
        "backward() adds to .grad, and no line sets it to zero.",
        f"{name}.grad = None (or {name}.grad.zero_()) after the step",
    )


def _is_own_step(node: ast.AST) -> bool:
    """Is it a step of gradient descent by hand?"""
    if not isinstance(node, ast.AugAssign) or not isinstance(node.op, ast.Sub):
        return False
    name = path_of(node.target).removesuffix(".data")
    gradients = {f"{name}.grad", f"{name}.grad.data"}
    return bool(name) and any(
        isinstance(attribute, ast.Attribute) and path_of(attribute) in gradients
        for attribute in ast.walk(node.value)
    )


def _drops_gradients(node: ast.AST) -> bool:
    """May it set gradients to zero, or drop them?"""
    if isinstance(node, ast.Call) and method_of(node) in {
        *("zero_", "zero_grad", "fill_", "mul_", "detach_", "setattr", "grad", "zeros_like"),
    }:
        return True
    if isinstance(node, ast.Name) and node.id == "setattr":
        return True
    stored = isinstance(node, ast.Attribute) and node.attr == "grad"
    return stored and not isinstance(node.ctx, ast.Load)  # type: ignore[attr-defined]


def _read_again(source: Source, function: ast.FunctionDef) -> Iterator[Finding]:
    """``np.load(self.path)[index]`` in ``__getitem__``."""
    parameters = [argument.arg for argument in function.args.args]
    if len(parameters) < 2:
        return
    by_index = _follow(function, parameters[1])
    for line in function.body:
        calls = [node for node in ast.walk(line) if isinstance(node, ast.Call)]
        if isinstance(line, ast.If | ast.Try) or _is_kept(line):
            continue  # read once, and kept
        for call in calls:
            if not _READS_WHOLE.search(f".{path_of(call.func)}") or not call.args:
                continue
            if {keyword.arg for keyword in call.keywords} & _LAZY:
                continue
            if by_index.intersection(names_in(call)):
                continue
            yield line_finding(
                source,
                call,
                "file-read-for-each-sample",
                f"{source.short(call)} reads all of a file for each sample",
                f"the file does not depend on {parameters[1]}: of what is read one sample is kept, "
                "and the next reads it all over.",
                "read it once, in __init__; of a large array np.load(path, mmap_mode='r'), of "
                "torch.load mmap=True",
                "warning",
            )


def _is_kept(line: ast.stmt) -> bool:
    targets = line.targets if isinstance(line, ast.Assign) else []
    return any(isinstance(target, ast.Attribute) for target in targets)


def _follow(function: ast.FunctionDef, name: str) -> set[str]:
    """Names that depend on a parameter, and those of loops and handles, which may."""
    names = {name}
    for _ in range(2):
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                value: ast.AST = node.value
                targets: list[ast.AST] = list(node.targets)
            elif isinstance(node, ast.For | ast.comprehension):
                value, targets = node.iter, [node.target]
            elif isinstance(node, ast.withitem) and node.optional_vars is not None:
                value, targets = node.context_expr, [node.optional_vars]
            else:
                continue
            if names.intersection(names_in(value)):
                names |= {name for target in targets for name in names_in(target)}
    return names
