"""Tunables in a command's words, and what stands for them in calls of training libraries.

``{name:present value}`` is a tunable; double braces make one literal.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Final

from trainfit.results.dataloader import LoaderSettings
from trainfit.results.files.errors import TrainfitError
from trainfit.results.runs.steps import Framework

#: Tunables that ``trainfit plan`` fills by tuning the DataLoader; named as its arguments are.
LOADER_TUNABLES: Final = ("num_workers", "prefetch_factor", "pin_memory", "persistent_workers")
#: Those of them that are on or off.
LOADER_SWITCHES: Final = ("pin_memory", "persistent_workers")
#: A number as a command says it.
NUMBER: Final = re.compile(r"[0-9]{1,9}")
#: Tunables that trainfit can fill; ``grad_accum`` are the micro-batches of an optimizer step.
TUNABLES: Final = ("batch_size", "grad_accum", "amp", *LOADER_TUNABLES)
#: Lengths of sequences and of generated texts: what they cost is told, and how long ones fit.
LENGTHS: Final = ("seq_len", "max_new_tokens")
#: Other names of them: those that libraries' options have.
ALIASES: Final = {
    **dict.fromkeys(
        (
            "gradient_accumulation_steps",  # Transformers, Accelerate, nanoGPT
            "accumulate_grad_batches",  # Lightning
            "grad_accum_steps",  # timm
        ),
        "grad_accum",
    ),
    **dict.fromkeys(
        (
            *("max_length", "max_seq_length", "max_seq_len", "max_sequence_length"),  # TRL, peft
            *("cutoff_len", "block_size"),  # LLaMA-Factory; run_clm, nanoGPT
            *("model_max_length", "sequence_len", "sequence_length", "seq_length"),  # Axolotl
            *("context_length", "ctx_len", "seqlen"),
        ),
        "seq_len",
    ),
    **dict.fromkeys(("max_gen_toks", "max_tokens_to_generate"), "max_new_tokens"),
}
_NAMES: Final = (*TUNABLES, *LENGTHS, *ALIASES)
_IDENTIFIER: Final = re.compile(r"[A-Za-z_]\w*")


@functools.cache
def _placeholder(also: frozenset[str] = frozenset()) -> re.Pattern[str]:
    """A pattern of the names that are always tunables, and of those that a user has made some
    (``also``)."""
    names = sorted({*_NAMES, *also}, key=len, reverse=True)
    tunable = rf"({'|'.join(map(re.escape, names))})(?::([^{{}}]*))?"
    return re.compile(rf"\{{\{{{tunable}\}}\}}|\{{{tunable}\}}")


#: Looks like a placeholder; whether it is a misspelt one is a matter of its name.
_BRACES = re.compile(r"\{([A-Za-z_][\w-]*)(?::[^{}]*)?\}")
#: How alike a name must be to be taken for a misspelt one ("batch_size" is misspelt most);
#: "amp" is too short to tell, and "memory" or "workers" may be words of the user's own.
_ALIKE: Final = {"batch_size": 0.75} | dict.fromkeys(
    ("grad_accum", *LENGTHS, *ALIASES, *LOADER_TUNABLES), 0.8
)
#: Spellings of a prefetch_factor that is left to PyTorch: 2, or none without workers.
_UNSET: Final = ("None", "none", "null")

_SWITCHES: Final = tuple(
    tuple(pair.split())
    for pair in ("true false", "True False", "TRUE FALSE", "1 0", "yes no", "on off")
)
_OPPOSITE_SWITCH = {value: other for pair in _SWITCHES for value, other in (pair, pair[::-1])}
#: How Accelerate, Transformers and Lightning spell bfloat16, float16 and neither.
PRECISIONS: Final = (
    ("bf16", "fp16", "no"),
    ("bf16", "fp16", "fp32"),
    ("bfloat16", "float16", "float32"),
    ("bfloat16", "float16", "none"),
    ("bf16-mixed", "16-mixed", "32-true"),
    ("bf16-mixed", "16-mixed", "32"),
)
#: What is off goes to bfloat16.
_OPPOSITE_PRECISION = {
    "bf16": "no",
    "fp16": "no",
    "no": "bf16",
    "fp32": "bf16",
    "bfloat16": "float32",
    "float16": "float32",
    "float32": "bfloat16",
    "none": "bfloat16",
    "bf16-mixed": "32-true",
    "16-mixed": "32-true",
    "32-true": "bf16-mixed",
    "32": "bf16-mixed",
}


class CommandError(TrainfitError):
    """A command that cannot be planned; one line with the word, the reason, the remedy."""


def placeholders(words: Sequence[str], also: str = "") -> dict[str, str]:
    """The placeholders' present values; each must have one, and the same everywhere.

    ``also`` is a name that is a tunable in this command, whatever it means (empty: none).
    Raises :class:`CommandError`.
    """
    present: dict[str, str] = {}
    pattern = _placeholder(frozenset({also} - {""}))
    for word in words:
        _check_spelling(word, also)
        for match in pattern.finditer(word):
            _, _, name, value = match.groups()
            if name is None:
                continue  # double braces: literal
            name = ALIASES.get(name, name)
            if not value:
                raise CommandError(
                    f"placeholder {{{name}}} in {word!r} has no current value; "
                    f"write {{{name}:VALUE}}"
                )
            if present.setdefault(name, value) != value:
                raise CommandError(
                    f"placeholder {{{name}}} has two current values, {present[name]!r} and "
                    f"{value!r}; write the same in both places"
                )
    _check_values(present)
    return present


def fill(word: str, values: Mapping[str, str]) -> str:
    """``word`` with ``values`` in its placeholders, and literal ones without a pair of braces."""

    def filled(match: re.Match[str]) -> str:
        name = match.group(3)
        if name is None:
            return match.group(0)[1:-1]
        return values.get(ALIASES.get(name, name), match.group(0))

    return _placeholder(frozenset(values) - frozenset(_NAMES)).sub(filled, word)


def tunable_named(text: str) -> str:
    """The tunable that a user names, with its usual name; raises :class:`CommandError`."""
    name = text.strip().lstrip("-").replace("-", "_")
    if not _IDENTIFIER.fullmatch(name):
        raise CommandError(
            f"--solve {text!r}: expected the name of a tunable or of an option of the script; "
            "write for example --solve seq_len"
        )
    name = ALIASES.get(name, name)
    if name in (*LOADER_TUNABLES, "amp", "grad_accum", "batch_size"):
        raise CommandError(
            f"--solve {name}: a plan chooses it without being asked; "
            "name another option of the script, as in --solve seq_len"
        )
    return name


def literal(word: str) -> str:
    """``word`` with double braces around what would be read as a placeholder."""
    return _placeholder().sub(lambda match: "{" + match.group(0) + "}", word)


def other_amp(words: Sequence[str], present: Mapping[str, str]) -> str | None:
    """The value for ``{amp}`` that means the opposite, in the same spelling."""
    value = present.get("amp")
    if value is None:
        return None
    tables = [_OPPOSITE_SWITCH, _OPPOSITE_PRECISION]
    for table in reversed(tables) if _names_precision(words) else tables:
        if value in table:
            return table[value]
    known = dict.fromkeys([*_OPPOSITE_SWITCH, *_OPPOSITE_PRECISION])
    raise CommandError(
        f"placeholder {{amp}}: unknown value {value!r}; write one of {', '.join(known)}"
    )


def float16_amp(words: Sequence[str], present: Mapping[str, str]) -> str | None:
    """The value for ``{amp}`` that means float16, in the present spelling; ``None`` where its
    values only switch AMP on and off."""
    value = present.get("amp")
    if value is None or (value in _OPPOSITE_SWITCH and not _names_precision(words)):
        return None
    return next((spelled[1] for spelled in PRECISIONS if value in spelled), None)


def amp_precisions(float16: str | None, *others: str | None) -> dict[str, str]:
    """The values for ``{amp}`` that mean "bfloat16", "float16" and "off" where ``float16`` is that
    for float16, in the spelling that ``others`` are of too; fewer where no spelling is known."""
    if float16 is None:
        return {}
    known = [each for each in others if each is not None]
    for spelled in PRECISIONS:
        if spelled[1] == float16 and set(known) <= set(spelled):
            return dict(zip(("bfloat16", "float16", "off"), spelled, strict=True))
    return {"float16": float16}


def _names_precision(words: Sequence[str]) -> bool:
    """Does the option's name tell that ``{amp}`` is a precision? "no" is one to Accelerate and a
    switch elsewhere."""
    at = next(i for i, word in enumerate(words) if "{amp:" in word)
    return "precision" in "".join(words[max(at - 1, 0) : at + 1]).lower()


def loader_values(present: Mapping[str, str], settings: LoaderSettings) -> dict[str, str]:
    """``settings`` for the DataLoader's placeholders among ``present``, in their spelling.

    Without workers PyTorch refuses a prefetch_factor: it is left unset where the present
    spelling can say so, and as it is otherwise (the script has to leave it out).
    """
    values: dict[str, str] = {}
    for name in LOADER_TUNABLES:
        if name not in present:
            continue
        if name in LOADER_SWITCHES:
            on = settings.pin_memory if name == "pin_memory" else _persistent(settings)
            values[name] = _switched(present[name], to=on)
        elif name == "prefetch_factor" and not settings.num_workers:
            values[name] = present[name]
        else:
            values[name] = str(getattr(settings, name))
    return values


def present_settings(present: Mapping[str, str]) -> dict[str, int | bool | None]:
    """What the DataLoader's placeholders say now; a prefetch_factor that is unset is ``None``."""
    settings: dict[str, int | bool | None] = {}
    for name in LOADER_TUNABLES:
        if name not in present:
            continue
        text = present[name]
        if name in LOADER_SWITCHES:
            settings[name] = _is_on(text)
        else:
            settings[name] = None if text in _UNSET else int(text)
    return settings


def as_switch(text: str | None) -> bool | None:
    """Does ``text`` say on, or off? ``None``: neither."""
    return _is_on(text) if text in _OPPOSITE_SWITCH else None


def opposite_switch(text: str) -> str:
    """What ``text``, which says on or off, says the other way round, in the same spelling."""
    return _OPPOSITE_SWITCH[text]


def _persistent(settings: LoaderSettings) -> bool:
    """PyTorch refuses persistent_workers where there are none."""
    return settings.persistent_workers and settings.num_workers > 0


def _switched(present: str, *, to: bool) -> str:
    return present if _is_on(present) == to else _OPPOSITE_SWITCH[present]


def _is_on(text: str) -> bool:
    return any(text == pair[0] for pair in _SWITCHES)


# -- checks ------------------------------------------------------------------------------------


def _check_spelling(word: str, also: str) -> None:
    for name in _BRACES.findall(word):
        if name == also:
            continue
        plain = name.lower().replace("-", "_")
        near = [plain] if plain in _NAMES else _alike(plain)
        if name not in _NAMES and near:
            raise CommandError(
                f"placeholder {{{name}}} in {word!r} is not a tunable; did you mean "
                f"{{{near[0]}:…}}? (known: {', '.join((*TUNABLES, *LENGTHS))})"
            )


def _alike(name: str) -> list[str]:
    close = difflib.get_close_matches
    return [known for known, share in _ALIKE.items() if close(name, [known], 1, share)]


def _check_values(present: Mapping[str, str]) -> None:
    _check_number(present, "batch_size", 1, "batch size", "8")
    _check_number(present, "grad_accum", 1, "number of micro-batches", "4")
    _check_number(present, "num_workers", 0, "number of workers", "4")
    _check_number(present, "seq_len", 1, "sequence length", "2048")
    _check_number(present, "max_new_tokens", 1, "number of tokens", "512")
    for name in present.keys() - {*TUNABLES, *LENGTHS}:
        _check_number(present, name, 1, "number", "8")
    if present.get("prefetch_factor") not in _UNSET:
        _check_number(present, "prefetch_factor", 1, "prefetch factor", "2")
    for name in LOADER_SWITCHES:
        if name in present and present[name] not in _OPPOSITE_SWITCH:
            raise CommandError(
                f"placeholder {{{name}}}: {present[name]!r}: expected on or off; write one of "
                f"{', '.join(_OPPOSITE_SWITCH)}"
            )


def _check_number(
    present: Mapping[str, str], name: str, least: int, what: str, example: str
) -> None:
    text = present.get(name, example)
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
        raise CommandError(
            f"placeholder {{{name}}}: expected a {what}, an integer of {least} or more, got "
            f"{text!r}; write for example {{{name}:{example}}}"
        )


# ---
# Arguments of training libraries for what a plan recommends: what a user of their loops changes in
# a script, in the place of ``DataLoader(…)`` and ``torch.autocast(…)``.


@dataclasses.dataclass(frozen=True)
class FrameworkCall:
    """The call of a library that takes the settings of its training loop.

    ``names`` are its arguments for tunables (without one, the script makes that itself);
    ``precision`` is what to write for autocast's dtype, or "off". float16 comes with a gradient
    scaler in all of them.
    """

    call: str
    names: Mapping[str, str]
    precision: Mapping[str, str]

    def with_precision(self, dtype: str) -> str:
        """The call that computes in ``dtype``, or in float32 ("off")."""
        return f"{self.call}({self.precision[dtype]}, …)"

    @property
    def with_accumulation(self) -> str:
        """The call that sets the micro-batches of an optimizer step."""
        return f"{self.call}({self.names['grad_accum']}=…)"


FRAMEWORKS: Final[Mapping[Framework, FrameworkCall]] = {
    "Transformers": FrameworkCall(
        "TrainingArguments",
        {
            "batch_size": "per_device_train_batch_size",
            "grad_accum": "gradient_accumulation_steps",
            **{name: f"dataloader_{name}" for name in LOADER_TUNABLES},
        },
        {"bfloat16": "bf16=True", "float16": "fp16=True", "off": "bf16=False, fp16=False"},
    ),
    "Lightning": FrameworkCall(
        "Trainer",
        {"grad_accum": "accumulate_grad_batches"},
        {
            "bfloat16": 'precision="bf16-mixed"',
            "float16": 'precision="16-mixed"',
            "off": 'precision="32-true"',
        },
    ),
    "Accelerate": FrameworkCall(
        "Accelerator",
        {"grad_accum": "gradient_accumulation_steps"},
        {
            "bfloat16": 'mixed_precision="bf16"',
            "float16": 'mixed_precision="fp16"',
            "off": 'mixed_precision="no"',
        },
    ),
}
