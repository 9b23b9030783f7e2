"""What a training script's own code does between the phases: what to do instead."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Habit:
    """What is done there, and its fix."""

    what: str
    action: str


_LESS_OFTEN: Final = (
    "do it less often, or in a thread or process of its own on copies of the tensors"
)
_FOR_EACH: Final = Habit(
    "goes over the parameters one by one",
    "use what PyTorch has for all of them at once: clip_grad_norm_, "
    "torch.optim.swa_utils.AveragedModel with get_ema_multi_avg_fn, a foreach optimizer; or do it "
    "every few steps",
)
_OF_PARAMETERS: Final = re.compile(
    r"parameters\(|\bparams?\b|param_groups|buffers\(|shadow|state_dict|weights|grads?\b"
)
LOGS: Final = Habit("logs", "log every 50 steps, and let the file's buffer be, without flush")
_KNOWN: Final[tuple[tuple[re.Pattern[str], Habit], ...]] = (
    (
        re.compile(r"update_parameters$"),
        Habit(
            "updates an average of the weights",
            "do it every few steps, with a decay for as many; "
            "AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay)) is quicker than a "
            "function for each parameter (avg_fn)",
        ),
    ),
    (
        re.compile(r"(?:^|\.)tolist$"),
        Habit(
            "makes Python numbers of a tensor",
            "compute on the tensor itself (argmax, eq, sum, topk), and make a number of the result "
            "alone; or do it every 100 steps",
        ),
    ),
    (
        re.compile(r"deepcopy|\bcopy\.|state_dict|EMA|\bema\b"),
        Habit(
            "copies the model or its state",
            "update the average in place (torch.optim.swa_utils.AveragedModel with "
            "get_ema_multi_avg_fn), or every few steps only",
        ),
    ),
    (
        re.compile(
            r"savez?\w*$|\bdump\b|zipfile|to_csv|to_parquet|imsave|imwrite|savefig|write_video"
            r"|^shutil\.|dumps$"
        ),
        Habit("writes a file", f"{_LESS_OFTEN}; what is written often should be small"),
    ),
    (
        re.compile(r"\.(?:commit|execute|executemany|executescript)$|^sqlite3\."),
        Habit(
            "writes to a database",
            "collect rows and write them every 100 steps, with one executemany() and one commit() "
            "(each commit waits until the disk has written); SQLite with PRAGMA journal_mode=WAL "
            "and synchronous=NORMAL waits for less",
        ),
    ),
    (
        re.compile(r"fsync|fdatasync"),
        Habit(
            "waits until a disk has written",
            "do without fsync() in the loop: the system writes by itself; once at a checkpoint is "
            "enough",
        ),
    ),
    (
        re.compile(r"print|logg|\.flush$|\.write$|tqdm|set_postfix|set_description"),
        LOGS,
    ),
    (
        re.compile(r"plt\.|pyplot|matplotlib|add_image|add_histogram|wandb|mlflow|tensorboard"),
        Habit("draws or logs", _LESS_OFTEN),
    ),
    (
        re.compile(r"loss|criterion", re.IGNORECASE),
        Habit(
            "computes the loss in Python",
            "compute it by operators on whole tensors (weights and masks made once, one sum at "
            "the end) instead of a loop over elements",
        ),
    ),
    (
        re.compile(r"^subprocess\.|\bsystem$|popen|check_output", re.IGNORECASE),
        Habit(
            "starts a program",
            "ask the system itself (shutil.disk_usage, psutil, pynvml), or start it every few "
            "hundred steps and do not wait for it",
        ),
    ),
    (
        re.compile(
            r"(?:^|\.)(?:Manager|Pool|ProcessPoolExecutor|ThreadPoolExecutor|fork)$"
            r"|^multiprocessing\.(?:managers|popen_\w+|process|context|util)\.|\w*[Pp]roc\w*\.start$"
        ),
        Habit(
            "starts processes",
            "start them once, before the loop, and give them what is to be done through a queue",
        ),
    ),
    (
        re.compile(r"^torch\.distributions\.|\.(?:log_prob|entropy)$"),
        Habit(
            "asks a distribution",
            "for many states at once (environments that step together, or all steps of an episode "
            "after it); torch.distributions.Distribution.set_default_validate_args(False) leaves "
            "its checks of each value out",
        ),
    ),
    (
        re.compile(r"(?:^|\.)(?:shuffle|permutation|randperm|sort|sorted|argsort)$"),
        Habit(
            "orders a whole list",
            "do it once an epoch, or draw only as many indices as a batch has (torch.randint, "
            "random.sample)",
        ),
    ),
    (
        re.compile(
            r"histogram|quantile|percentile|confusion_matrix|roc_|_score$|(?<!geo)metric|^sklearn\."
        ),
        Habit(
            "computes statistics",
            "do it every 100 steps, of a part of the numbers, or by operators on whole tensors "
            "(torch.histc, torch.quantile)",
        ),
    ),
    (
        re.compile(r"ndimage\.|^cv2\.|^PIL\.|^skimage\.|albumentations|torchvision\.transforms"),
        Habit(
            "transforms images",
            "do it in a torch.utils.data.Dataset whose DataLoader has num_workers=1 or more: they "
            "are made while the step computes; or for the whole batch at once, on the device",
        ),
    ),
    (
        re.compile(r"jit\.(?:trace|script)\b|\bfx\.symbolic_trace|export\.export\b|onnx"),
        Habit(
            "traces or compiles the model",
            "do it once, before the loop: what comes of it is used for all steps",
        ),
    ),
    (
        re.compile(r"inspect\.(?:stack|getframeinfo|getsource)|traceback\.|findsource"),
        Habit(
            "reads the script's source to tell who called",
            "sys._getframe(1) has the caller's line (f_lineno) and file without that; or leave it "
            "out",
        ),
    ),
    (
        re.compile(r"^psutil\.|^_?pslinux|pynvml|GPUtil|nvidia_smi|memory_summary|memory_stats"),
        Habit(
            "asks for the state of the machine",
            "ask every few hundred steps, or from a thread of its own",
        ),
    ),
    (
        re.compile(
            r"linalg\.(?:svd\w*|eig\w*|qr|inv\w*|pinv|cholesky\w*|matrix_\w+|cond|s?l?o?g?det)$"
            r"|(?:^|\.)torch\.(?:svd\w*|pinverse|matrix_exp)$|(?:^|\.)(?:svd|svdvals|eigh|sqrtm)$"
        ),
        Habit(
            "decomposes matrices",
            "do it every few steps; for the largest singular value one power iteration a step "
            "(torch.nn.utils.parametrizations.spectral_norm), for orthogonal weights "
            "(W @ W.T - I).square().sum(), for a norm matmuls alone",
        ),
    ),
    (
        re.compile(r"gc\.collect|empty_cache"),
        Habit("cleans up memory", "leave it to Python and PyTorch: not in each step"),
    ),
)
_BY_WAIT: Final = {
    "sleep": Habit("sleeps", "remove the sleep, or wait for what is needed only when it is needed"),
    "lock": Habit("waits for a lock", "hold the lock for less, or not while the training needs it"),
    "network": Habit(
        "waits for the network",
        "what is sent: from a thread of its own through a queue, many values at once, without "
        "waiting for answers; what is read: for a whole batch in one request, and ahead of the "
        "step (a Dataset whose DataLoader has workers), or kept on a local disk",
    ),
    "process": Habit(
        "waits for another process",
        "all that it asks are waited for, the slowest sets the pace: let them work while the step "
        "computes (send first, receive after it), and more of them at once, as many as there are "
        "cores; what they do is the cost: a profile of one (`py-spy top --pid PID`) has its lines",
    ),
    "disk": Habit("waits for a file", _LESS_OFTEN),
}
#: How a queue is asked for what comes next; and by what multiprocessing's waits for it.
_GET: Final = re.compile(r"(?:^|\.)get$")
_RECEIVES: Final = ("read", "select.poll", "selectors.select")
_QUEUE: Final = Habit(
    "waits for a queue",
    "what fills it is slower than the training: look at the thread or process that does (threads "
    "of Python take turns, processes do not); a torch.utils.data.Dataset whose DataLoader has "
    "workers makes batches in processes, while the step computes",
)
#: How something is put into a queue, and what is done there where that waits.
_PUT: Final = re.compile(r"(?:^|\.)put$")
_FULL: Final = Habit(
    "waits until a queue has room",
    "what reads it is slower than the training: put less often (every 50 steps), or drop what "
    "finds no room (put_nowait); weights for other processes go through memory that all share "
    "(tensor.share_memory_() once, then copy_() into it) without a copy in the queue",
)
#: What puts into a queue that a thread writes to a log: a line that waits for that, waits for both.
_LOGGERS: Final = re.compile(
    r"add_(?:histogram|image\w*|scalars?|video|figure|embedding|mesh|text)$|tensorboard|wandb|mlflow"
)
_LOG_IS_FULL: Final = Habit(
    "logs more than its thread can write",
    "histograms and images every 500 steps, numbers every 50: less goes through the log's queue",
)
#: Where a thread waits for what a pool of threads or processes does.
_POOL: Final = re.compile(r"^(?:concurrent\.futures|multiprocessing\.pool|joblib)\.")
_POOLED: Final = Habit(
    "waits for a pool of threads or processes",
    "give it the work for the next step before this one (submit(), map_async()), and take its "
    "results after it: now it rests while the step computes; make the pool once; a DataLoader with "
    "workers does both, and work of some milliseconds is done sooner without a pool",
)
BATCHES: Final = Habit(
    "makes batches by hand",
    "make samples in a torch.utils.data.Dataset and take batches from a DataLoader with "
    "num_workers=1 or more: they are then made while the step computes",
)
#: What batches are made with, by the function's own name: its module says nothing of that. An
#: environment is stepped by other code.
_MAKES: Final = re.compile(
    r"(?:stack|cat|concat\w*|tensor|\w*numpy|\w*array|collate\w*|\w*batch\w*|\w*sample\w*|load\w*"
    r"|choices?|\w*perm\w*|shuffle|randint\w*|index\w*)$"
)
DRAWS: Final = Habit(
    "draws random numbers",
    "draw them for many steps at once (a tensor whose rows are the batches); what stands for data "
    "is made by the workers of a DataLoader, while the step computes",
)
#: Functions that fill a tensor or an array with them.
_RANDOM: Final = re.compile(
    r"^torch\.(?:rand|randn|randint|normal|bernoulli|multinomial)(?:_like)?$"
    r"|(?:^|\.)(?:standard_)?(?:normal|uniform|randn|rand|random_sample)_?$"
)
ALONE: Final = Habit(
    "runs Python code",
    "do it for many at once, or in a process of its own; if it makes batches, in a Dataset whose "
    "DataLoader has workers",
)
_PYTHON: Final = Habit(
    "runs Python code",
    "use operators on whole tensors instead of loops over elements; move what makes batches into "
    "the data set, so that workers do it; do the rest every few steps",
)


def adds_to(name: str) -> Habit:
    """The habit of a line that makes a new tensor or array of all that a variable has, and a little
    more."""
    return Habit(
        f"copies all of `{name}` to add to it",
        "append to a Python list and join that once (torch.cat, pd.DataFrame), write into a "
        "tensor that is made once, or keep sums instead of all values",
    )


def over_all_of(name: str) -> Habit:
    """The habit of a line that computes over all of a variable, which becomes longer with each
    step."""
    return Habit(
        f"goes over all of the growing `{name}`",
        "keep a running sum or mean, or look at the last 100 entries (collections.deque(maxlen=100)"
        "); what needs all of them, do once an epoch",
    )


def held_at(line: str) -> Habit:
    """The habit of a line that waits for a lock, which another thread holds at ``line``."""
    return Habit(
        f"waits for a lock that a thread holds at {line}",
        "hold it for less there: copy what is needed, and write or compute after it is let go",
    )


def more_handlers(name: str, place: str) -> Habit:
    """The habit of a line that logs, through handlers that become more and more."""
    text = f" at {place}" if place else ""
    return Habit(
        "logs through more and more handlers",
        f"add the handler once, where the script begins: `{name}` grows{text}, and each message is "
        "written as often as there are handlers",
    )


def from_memory(name: str, habit: Habit) -> Habit:
    """The habit of a line that makes batches of what the training itself has put into a list: there
    is no data set that a worker could read."""
    if habit is BATCHES:
        what = f"joins samples of `{name}`, which the training fills"
    elif habit is ALONE:
        what = habit.what
    else:
        return habit
    return Habit(
        what,
        "do it for many at once (environments that step together); keep what steps give in tensors "
        f"that are made once, a row for each, in place of the list `{name}`: memory[indices] is a "
        "batch in one operator",
    )


def _is_operator(names: Sequence[str]) -> bool:
    """Is what is called an operator on a tensor, or unknown? A function that computes more of each
    (statistics, a text) has no form for all of them at once."""
    return len(names) < 2 or names[0] == names[-1] or names[-1].startswith("torch.")


#: How Python gets at each element of a tensor.
_OF_ELEMENTS: Final = re.compile(
    r"_tensor\.__iter__$|(?:^|\.)(?:unbind|item)$|^(?:int|float|bool)$"
)


_INDEXED: Final = (
    "what is indexed in the loop should be a list or an array (a deque goes through its entries to "
    "each index, a tensor makes a new tensor of each)"
)


def _over_elements(over: str) -> Habit:
    return Habit(
        f"goes over the elements of `{over}` in Python",
        "use operators on whole tensors (torch.bincount counts classes, also pairs of them: "
        "bincount(n * a + b)), or .tolist() before the loop; what stays the same, as the "
        f"weights of a sampler, compute once; {_INDEXED}",
    )


def _over_numbers(over: str) -> Habit:
    return Habit(
        f"goes over `{over}` in Python",
        "take all at once from a tensor or an array that is made once (memory[indices]), by "
        f"operators on whole tensors; {_INDEXED}",
    )


def is_queue(names: Sequence[str], waits_for: str) -> bool:
    """Is it a queue, of threads or of processes, that is waited for?"""
    if not names or _GET.search(names[0]) is None:
        return False
    return waits_for == "lock" or names[-1] in _RECEIVES


def habit_of(
    names: Sequence[str], waits_for: str, *, has_loader: bool, over: str = "", bare: bool = False
) -> Habit:
    """The habit in what is called at a line, from there to the innermost function; ``over`` is what
    the loop around it goes over. ``bare``: a function that the loop of the training calls has that
    loop, and computes in it without calling anything."""
    text = " ".join(names)
    if is_queue(names, waits_for):
        return _QUEUE
    if names and waits_for in ("lock", "process") and _PUT.search(names[0]) is not None:
        return _FULL
    if waits_for == "lock" and any(map(_POOL.match, names)):
        return _POOLED
    if waits_for == "lock" and any(map(_LOGGERS.search, names)):
        return _LOG_IS_FULL
    if waits_for in ("sleep", "lock", "network", "process"):
        return _BY_WAIT[waits_for]
    for pattern, habit in _KNOWN:
        if any(pattern.search(name) for name in names) or pattern.search(text):
            return habit
    if waits_for:
        return _BY_WAIT[waits_for]
    if _OF_PARAMETERS.search(over) and _is_operator(names):
        return _FOR_EACH
    if over and (bare or any(map(_OF_ELEMENTS.search, names))):
        return _over_numbers(over) if over.startswith("range") else _over_elements(over)
    if has_loader:
        return _PYTHON
    if names and all(map(_RANDOM.search, names)):
        return DRAWS
    makes = any(_MAKES.fullmatch(name.rpartition(".")[2]) for name in names)
    return BATCHES if makes else ALONE
