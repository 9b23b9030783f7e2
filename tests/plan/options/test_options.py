"""Which options of a script are its tunables, and how the launch command says other values."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainfit.plan.command.options import NAMES, tunable_of, without_negation
from trainfit.plan.command.parsing import Command, parse_command
from trainfit.plan.runs.option_proof import _batch_refusal, _effect, _rows_refusal
from trainfit.plan.runs.options import CommandOptions, ObservedSettings, read_options
from trainfit.plan.sizing.recommendation import EffectiveBatch, accumulation_for
from trainfit.results.dataloader import LoaderSettings
from trainfit.results.runs.script import ScriptOption
from trainfit.results.runs.steps import StepMakeup
from trainfit.scripts.option_parsers import of_argparse

#: A command that is there, and needs no script.
TOOL = ("python", "-m", "json.tool")
#: What most scripts show.
SEEN = ObservedSettings(
    loader_batch=8,
    call_batch=8,
    loader=LoaderSettings(0),
    accumulation=1,
)


def command(*words: str) -> Command:
    return parse_command([*TOOL, *words])


def options_of(parser: argparse.ArgumentParser, *words: str) -> tuple[ScriptOption, ...]:
    """As a run of the script with these words tells them."""
    return tuple(of_argparse(parser, words, parser.parse_args(words)))


def read(
    parser: argparse.ArgumentParser,
    *words: str,
    seen: ObservedSettings = SEEN,
    before: tuple[str, ...] = TOOL,
) -> CommandOptions:
    found = read_options(parse_command([*before, *words]), options_of(parser, *words), seen)
    assert found.command.fill() == [*before, *words], "currently it is the user's command"
    return found


def argument(*flags: str, **kwargs: Any) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument(*flags, **kwargs)
    return parser


def launched(found: CommandOptions, **values: str) -> list[str]:
    """The script's arguments with other values."""
    return found.command.fill(**values)[len(TOOL) :]


# -- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "tunable"),
    [
        ("--batch-size", "batch_size"),
        ("--batch_size", "batch_size"),
        ("-b", "batch_size"),
        ("--bs", "batch_size"),
        ("--per_device_train_batch_size", "batch_size"),
        ("--train_batch_size", "batch_size"),
        ("--train.batch_size", "batch_size"),
        ("training.batch_size", "batch_size"),
        ("+data.batch_size", "batch_size"),
        ("SOLVER.IMS_PER_BATCH", "batch_size"),
        ("BATCH_SIZE", "batch_size"),
        ("--batchSize", "batch_size"),
        ("--trainBatchSize", "batch_size"),
        ("--train-batchsize", "batch_size"),
        ("--global-batch-size", "batch_size"),
        ("--workers", "num_workers"),
        ("--nThreads", "num_workers"),
        ("--num_threads", "num_workers"),
        ("-j", "num_workers"),
        ("--num-workers", "num_workers"),
        ("--dataloader_num_workers", "num_workers"),
        ("--amp", "amp"),
        ("--use_amp", "amp"),
        ("--policy.use_amp", "amp"),
        ("--mixed_precision", "amp"),
        ("--trainer.precision", "amp"),
        ("--bf16", "amp"),
        ("--gradient_accumulation_steps", "grad_accum"),
        ("--accumulate_grad_batches", "grad_accum"),
        ("--prefetch-factor", "prefetch_factor"),
        ("--pin-mem", "pin_memory"),
        ("--persistent_workers", "persistent_workers"),
        ("--eval_batch_size", None),
        ("--per_device_eval_batch_size", None),
        ("--eval.batch_size", None),
        ("--validation-batch-size", None),
        ("--val_dataloader.batch_size", None),
        ("--test-bs", None),
        ("--testBatchSize", None),
        ("--valThreads", None),
        ("--batch_size_multiplier", None),
        ("--preprocessing_num_workers", None),
        ("--bf16_full_eval", None),
        ("--epochs", None),
    ],
)
def test_names_of_the_field(option: str, tunable: str | None) -> None:
    assert tunable_of(option) == tunable


def test_names_are_of_one_tunable_each() -> None:
    names = [name for each in NAMES.values() for name in each]
    assert len(names) == len(set(names))
    assert {name: tunable_of(f"--{name}") for name in names} == {
        name: tunable for tunable, each in NAMES.items() for name in each
    }
    assert without_negation("--no-amp") == "amp" and without_negation("--no-eval") == ""


# -- numbers: any spelling, any place ----------------------------------------------------------

_OTHERS = ("--lr", "--epochs", "-s")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", "--bs", type=int, default=8, dest="batch")
    for flag in _OTHERS:
        parser.add_argument(flag, default="8")
    parser.add_argument("--eval_batch_size", type=int, default=8)
    parser.add_argument("--verbose", action="store_true")
    return parser


def _spelled(spelling: str, value: int) -> list[str]:
    return [word.replace("N", str(value)) for word in spelling.split()]


@given(
    st.sampled_from(
        ["--batch-size N", "--batch-size=N", "--bs N", "--bs=N", "-b N", "-bN", "--batch N", ""]
    ),
    st.lists(
        st.sampled_from(
            [f"{flag} 8" for flag in _OTHERS] + ["--lr=8", "--eval_batch_size=8", "--verbose"]
        )
    ),
    st.lists(st.sampled_from(["--epochs=3", "-s8", "--eval_batch_size 8"])),
    st.integers(1, 9999),
)
def test_any_spelling_at_any_place_is_filled(
    spelling: str, before: list[str], after: list[str], other: int
) -> None:
    """What the script's own parser makes of the filled command is the value, and all else stays."""
    words = [word for each in (*before, spelling, *after) for word in _spelled(each, 8)]
    found = read(_parser(), *words)
    assert found.command.present["batch_size"] == "8"
    filled = launched(found, batch_size=str(other))
    now, then = _parser().parse_args(words), _parser().parse_args(filled)
    assert then.batch == other
    assert vars(then) == {**vars(now), "batch": other}


@given(st.integers(0, 64), st.booleans(), st.booleans())
def test_what_is_not_said_is_added_behind_where_it_changes(
    workers: int, separated: bool, launcher: bool
) -> None:
    parser = argument("--num_workers", type=int, default=0)
    parser.add_argument("words", nargs="*")
    words = ("--", "a") if separated else ()
    found = read(parser, *words)
    filled = launched(found, num_workers=str(workers))
    expected = [] if workers == 0 else [f"--num_workers={workers}"]
    assert filled == [*expected, *words]
    assert parser.parse_args(filled).num_workers == workers


@pytest.mark.usefixtures("warm")
def test_added_words_are_the_scripts_behind_a_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    before = ("python", "-m", "torch.distributed.run", "--nproc-per-node=1", "train.py")
    found = read(argument("--batch_size", type=int, default=8), before=before)
    assert found.command.line(batch_size="16") == f"{shlex.join(before)} --batch_size=16"
    assert found.command.target(batch_size="16").args == ("--batch_size=16",)


def test_options_of_a_subcommands_parent_go_before_it() -> None:
    parser = argument("--workers", type=int, default=0)
    parser.add_subparsers().add_parser("fit").add_argument("--lr")
    found = read(parser, "fit", "--lr", "1")
    assert launched(found, num_workers="3") == ["--workers=3", "fit", "--lr", "1"]


def test_an_option_with_short_spellings_only() -> None:
    found = read(argument("-b", type=int, default=8))
    assert launched(found, batch_size="9") == ["-b", "9"]
    assert launched(found) == []


def test_the_users_placeholders_come_first() -> None:
    given_words = ("--batch-size", "{batch_size:8}", "--lr", "{{amp:true}}")
    parser = _parser()
    parser.add_argument("--amp", default="true")
    options = options_of(parser, "--batch-size", "8", "--lr", "{amp:true}")
    on = dataclasses.replace(SEEN, autocast="bfloat16")
    found = read_options(command(*given_words), options, on)
    assert {each.name for each in found.found} == {"amp"}
    assert launched(found, batch_size="9", amp="false") == [
        "--batch-size", "9", "--lr", "{amp:true}", "--amp=false",
    ]  # fmt: skip
    marked = ("--amp={amp:true}", "--batch-size=8")
    found = read_options(command(*marked), options_of(parser, "--amp=true", "--batch-size=8"), on)
    assert [each.name for each in found.found] == ["batch_size"]
    assert found.command.other_amp == "false"
    assert found.command.supposed == {"batch_size"}


# -- what is left alone ------------------------------------------------------------------------


def left(found: CommandOptions, name: str) -> str:
    assert found.option(name) is None
    return next(each.reason for each in found.left if each.name == name)


def test_another_value_than_the_run_saw() -> None:
    found = read(argument("--batch_size", type=int, default=32))
    assert left(found, "batch_size") == "--batch_size is 32; the DataLoader has 8"
    assert found.command is found.base
    workers = read(argument("--workers", type=int, default=4))
    assert left(workers, "num_workers") == "--workers is 4; the DataLoader has 0"


def test_two_options_of_which_the_command_says_one() -> None:
    parser = argument("--batch_size", type=int, default=8)
    parser.add_argument("--train_batch_size", type=int, default=8)
    assert "several options" in left(read(parser), "batch_size")
    found = read(parser, "--train_batch_size=8")
    assert launched(found, batch_size="4") == ["--train_batch_size=4"]


def test_an_evaluations_batch_size_of_the_same_value() -> None:
    found = read(_parser(), "--eval_batch_size", "8")
    assert launched(found, batch_size="4") == ["--eval_batch_size", "8", "--batch-size=4"]


def test_values_that_are_no_numbers() -> None:
    parser = argument("--batch_size", type=lambda text: int(float(text)))
    assert "not an integer" in left(read(parser, "--batch_size", "8.0"), "batch_size")
    found = read(argument("--batch_size", type=int, choices=(8, 16), default=8))
    assert "certain values" in left(found, "batch_size")


def test_a_batch_size_that_shows_in_the_models_calls_alone() -> None:
    parser = argument("--batch_size", type=int, default=8)
    for seen in (
        ObservedSettings(call_batch=8),
        ObservedSettings(loader_batch=1, call_batch=8, loader=LoaderSettings(0)),
    ):
        found = read(parser, seen=seen).option("batch_size")
        assert found is not None and found.source == "calls"
    other = read(
        parser, seen=ObservedSettings(loader_batch=16, call_batch=8, loader=LoaderSettings(0))
    )
    assert "the DataLoader has 16" in left(other, "batch_size")


@pytest.mark.parametrize(
    ("flag", "value", "is_it"),
    [
        ("--sub-batch-size", 64, True),
        ("--ppo_batch", 64, True),
        ("--updateBatch", 64, True),
        ("--unroll_bsz", 64, True),
        ("--jobs", 64, False),
        ("--sub-batch-size", 32, False),  # a run saw something else
        ("--num-batches", 64, False),
        ("--log-every-batches", 64, False),
        ("--eval-sub-batch", 64, False),
        ("--batchnorm-groups", 64, False),
    ],
)
def test_a_batch_size_of_a_scripts_own_name(flag: str, value: int, is_it: bool) -> None:
    seen = ObservedSettings(call_batch=64, call_rows=64, accumulation=1)
    found = read(argument(flag, type=int, default=value), seen=seen).option("batch_size")
    assert (found is not None) is is_it
    if found is not None:
        assert (found.shown, found.present, found.source) == (flag, "64", "calls")


def test_a_batch_size_of_a_known_name_goes_before_one_of_its_own() -> None:
    parser = argument("--batch-size", type=int, default=8)
    parser.add_argument("--queue-batch", type=int, default=8)
    found = read(parser).option("batch_size")
    assert found is not None and found.shown == "--batch-size"


def test_a_batch_size_that_the_script_divides_among_its_ranks() -> None:
    """--batch-size 48 stayed as it was, and the advice was DataLoader(…, batch_size=16)."""
    parser = argument("--batch-size", type=int, default=48)
    seen = ObservedSettings(loader_batch=12, loader=LoaderSettings(0), ranks=4)
    option = read(parser, seen=seen).option("batch_size")
    assert option is not None and (option.present, option.source) == ("48", "loaders")
    double = dataclasses.replace(seen, loader_batch=24)
    assert _batch_refusal("", 96, double, "loaders") == ""
    assert "all ranks' DataLoaders is 48" in _batch_refusal("", 96, seen, "loaders")
    each = argument("--batch-size", type=int, default=12)  # of each rank
    own = read(each, seen=seen).option("batch_size")
    assert own is not None and own.source == "loader"
    alone = dataclasses.replace(seen, ranks=1)
    assert "the DataLoader has 12" in left(read(parser, seen=alone), "batch_size")


def test_a_batch_size_that_several_dataloaders_share() -> None:
    parser = argument("--batch_size", type=int, default=192)
    seen = ObservedSettings(loader_batch=96, call_batch=192, loader=LoaderSettings(0), joined=2)
    option = read(parser, seen=seen).option("batch_size")
    assert option is not None and (option.present, option.source) == ("192", "loaders")
    double = dataclasses.replace(seen, loader_batch=192)
    assert _batch_refusal("", 384, double, "loaders") == ""
    alone = dataclasses.replace(seen, joined=1)  # views of a sample, for example
    assert "the DataLoader has 96" in left(read(parser, seen=alone), "batch_size")


def test_a_batch_size_of_which_the_models_rows_are_a_multiple() -> None:
    """Rays of many points each, which the network is given in chunks: only a run can prove it."""
    parser = argument("--N_rand", type=int, default=100)
    seen = ObservedSettings(call_batch=4096, call_rows=6400)
    option = read(parser, seen=seen).option("batch_size")
    assert option is not None and (option.present, option.source) == ("100", "rows")
    assert _rows_refusal("", 200, dataclasses.replace(seen, call_rows=12800), 100, seen) == ""
    assert "rows, not 12800" in _rows_refusal("", 200, seen, 100, seen)
    odd = dataclasses.replace(seen, call_rows=6401)
    assert left(read(parser, seen=odd), "batch_size").startswith("--N_rand is 100; ")
    # What was seen itself goes before it; a DataLoader's word counts more.
    parser.add_argument("--batch_size", type=int, default=4096)
    both = read(parser, seen=seen).option("batch_size")
    assert both is not None and (both.shown, both.source) == ("--batch_size", "calls")
    fed = dataclasses.replace(seen, loader_batch=8, loader=LoaderSettings(0))
    assert read(parser, seen=fed).option("batch_size") is None


def test_nothing_of_a_script_without_options() -> None:
    found = read_options(command("x"), (), SEEN)
    assert (found.found, found.left, found.command) == ((), (), command("x"))


# -- words that no parser told of --------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "other"),
    [
        (["batch_size=8"], ["batch_size=16"]),
        (["training.batch_size=8", "x=8"], ["training.batch_size=16", "x=8"]),
        (["+model=a", "++data.batch_size=8"], ["+model=a", "++data.batch_size=16"]),
        (["--batch_size=8", "--lr=8"], ["--batch_size=16", "--lr=8"]),
        (["--batch_size", "8"], ["--batch_size", "16"]),
        (["eval.batch_size=8", "train.batch_size=8"], ["eval.batch_size=8", "train.batch_size=16"]),
    ],
)
def test_words_of_scripts_that_read_them_themselves(words: list[str], other: list[str]) -> None:
    found = read_options(command(*words), (), SEEN)
    assert launched(found, batch_size="16") == other
    assert launched(found) == words


NAMED = (
    ScriptOption(("data.batch_size",), "data.batch_size", "8", given=False, default="8"),
    ScriptOption(("data.pin_memory",), "data.pin_memory", "False", given=False, default="False"),
    ScriptOption(("val.batch_size",), "val.batch_size", "8", given=False, default="8"),
)


def test_a_configurations_values_are_said_as_name_and_value() -> None:
    found = read_options(command("seed=1"), NAMED, SEEN)
    assert found.command.fill() == [*TOOL, "seed=1"]
    words = launched(found, batch_size="64", pin_memory="true")
    assert words == ["seed=1", "data.batch_size=64", "data.pin_memory=True"]


def test_a_value_that_is_said_with_plus_signs_stays_where_it_is() -> None:
    said = dataclasses.replace(NAMED[0], given=True, default=None)
    found = read_options(command("++data.batch_size=8"), (said,), SEEN)
    assert launched(found, batch_size="64") == ["++data.batch_size=64"]


def test_variables_before_the_program() -> None:
    found = read_options(parse_command(["BATCH_SIZE=8", "OMP_NUM_THREADS=8", *TOOL]), (), SEEN)
    assert found.command.environment(batch_size="16") == {
        "BATCH_SIZE": "16", "OMP_NUM_THREADS": "8",
    }  # fmt: skip


# -- booleans ----------------------------------------------------------------------------------


def _pin(**kwargs: Any) -> argparse.ArgumentParser:
    return argument("--pin-mem", **{"dest": "pin", "default": False, **kwargs})


def _negatable(default: bool) -> argparse.ArgumentParser:
    parser = _pin(action="store_true")
    parser.add_argument("--no-pin-mem", action="store_false", dest="pin")
    parser.set_defaults(pin=default)
    return parser


def _str2bool(text: str) -> bool:
    return {"true": True, "1": True, "yes": True}.get(text.lower(), False)


_PARSERS = {
    "switch": lambda: _pin(action="store_true"),
    "switch and its opposite": lambda: _negatable(True),
    "switch, off, and its opposite": lambda: _negatable(False),
    "BooleanOptionalAction": lambda: _pin(action=argparse.BooleanOptionalAction, default=True),
    "value": lambda: _pin(type=_str2bool),
    "bare or value": lambda: _pin(type=_str2bool, nargs="?", const=True, default=True),
    "type=bool": lambda: _pin(type=bool),
    "type=bool, on": lambda: _pin(type=bool, default=True),
    "choices": lambda: _pin(choices=["0", "1"], default="0"),
}


@pytest.mark.parametrize("kind", _PARSERS)
@pytest.mark.parametrize("word", ["", "--pin-mem", "--no-pin-mem", "--pin-mem=1", "--pin-mem True"])
def test_however_a_boolean_is_written(kind: str, word: str) -> None:
    """Where the parser takes the word, the other value is said so that the parser has it."""
    parser, words = _PARSERS[kind](), word.split()

    def parsed(words: list[str]) -> bool:
        value = parser.parse_args(words).pin
        return value == "1" if isinstance(value, str) else bool(value)

    try:
        now = parsed(words)
    except SystemExit:
        return
    found = read(
        parser, *words, seen=dataclasses.replace(SEEN, loader=LoaderSettings(0, pin_memory=now))
    )
    for wanted in (True, False):
        assert parsed(launched(found, pin_memory=str(wanted).lower())) == wanted


def test_a_boolean_that_cannot_be_switched_off() -> None:
    pinned = dataclasses.replace(SEEN, loader=LoaderSettings(0, pin_memory=True))
    found = read(_pin(action="store_true", default=True), seen=pinned)
    assert left(found, "pin_memory") == "the command line cannot switch it off"


# -- mixed precision ---------------------------------------------------------------------------

_BF16 = dataclasses.replace(SEEN, autocast="bfloat16")
_FP16 = dataclasses.replace(SEEN, autocast="float16")


def _pair(kind: str = "switch") -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    for name in ("--bf16", "--fp16"):
        if kind == "switch":
            parser.add_argument(name, action="store_true")
        else:
            parser.add_argument(name, type=_str2bool, nargs="?", const=True, default=False)
    return parser


def _undecided() -> argparse.ArgumentParser:
    """As TRL's: bfloat16, unless it is said or float16 is."""
    parser = argument("--bf16", type=_str2bool, default=None)
    parser.add_argument("--fp16", type=_str2bool, nargs="?", const=True, default=False)
    return parser


def _timm() -> argparse.ArgumentParser:
    parser = argument("--amp", action="store_true")
    parser.add_argument("--amp-dtype", default="float16")
    return parser


@pytest.mark.parametrize(
    ("parser", "words", "seen", "present", "other", "float16", "lines"),
    [
        (argument("--amp", action="store_true"), "", SEEN, "false", "true", None,
         {"true": "--amp"}),
        (argument("--amp", action="store_true"), "--amp", _FP16, "true", "false", None,
         {"false": ""}),
        (argument("--no-amp", action="store_true"), "", _FP16, "true", "false", None,
         {"false": "--no-amp"}),
        (argument("--amp", default="no", choices=["no", "yes"]), "", SEEN, "false", "true", None,
         {"true": "--amp=yes"}),
        (argument("--use_amp", type=_str2bool, default=False), "--use_amp true", _BF16, "true",
         "false", None, {"false": "--use_amp false"}),
        (argument("--fp16", action="store_true"), "", SEEN, "false", "true", "true",
         {"true": "--fp16"}),
        (argument("--mixed_precision", default=None), "", SEEN, "None", "bf16", "fp16",
         {"bf16": "--mixed_precision=bf16", "None": ""}),
        (argument("--mixed_precision", default="no"), "--mixed_precision fp16", _FP16, "fp16",
         "no", "fp16", {"no": "--mixed_precision no", "bf16": "--mixed_precision bf16"}),
        (argument("--precision", default="32-true"), "", SEEN, "32-true", "bf16-mixed",
         "16-mixed", {"16-mixed": "--precision=16-mixed"}),
        (argument("--precision", default=32, choices=["16", "32", 16, 32]), "", SEEN, "32", "16",
         "16", {"16": "--precision=16"}),
        (_pair(), "", SEEN, "no", "bf16", "fp16", {"bf16": "--bf16", "fp16": "--fp16"}),
        (_pair(), "--fp16", _FP16, "fp16", "no", "fp16", {"no": "", "bf16": "--bf16"}),
        (_pair("bare"), "--bf16 True", _BF16, "bf16", "no", "fp16",
         {"no": "--bf16 False", "fp16": "--bf16 False --fp16"}),
        (_undecided(), "", _BF16, "bf16", "no", "fp16",
         {"bf16": "", "no": "--bf16=False", "fp16": "--bf16=False --fp16"}),
        (_undecided(), "--fp16 True", _FP16, "fp16", "no", "fp16",
         {"no": "--fp16 False --bf16=False", "bf16": "--fp16 False --bf16=True"}),
        (argument("--bf16", type=_str2bool), "", SEEN, "false", "true", None,
         {"true": "--bf16=True", "false": ""}),
        (_timm(), "", SEEN, "no", "bf16", "fp16",
         {"bf16": "--amp --amp-dtype=bfloat16", "fp16": "--amp"}),
        (argument("--dtype", default="float32"), "--dtype=float16", _FP16, "float16", "float32",
         "float16", {"bfloat16": "--dtype=bfloat16"}),
        (_timm(), "--amp --amp-dtype bfloat16", _BF16, "bf16", "no", "fp16",
         {"fp16": "--amp --amp-dtype float16", "no": "--amp-dtype bfloat16"}),
    ],
)  # fmt: skip
def test_precisions(
    parser: argparse.ArgumentParser,
    words: str,
    seen: ObservedSettings,
    present: str,
    other: str,
    float16: str | None,
    lines: dict[str, str],
) -> None:
    found = read(parser, *words.split(), seen=seen)
    assert found.command.present == {"amp": present}
    assert (found.command.other_amp, found.command.float16_amp) == (other, float16)
    for value, line in lines.items():
        assert " ".join(launched(found, amp=value)) == line
        parser.parse_args(line.split())


@pytest.mark.parametrize(
    ("parser", "words", "seen", "says"),
    [
        (argument("--amp", action="store_true"), "--amp", SEEN, "--amp says on; autocast was off"),
        (argument("--amp", action="store_true"), "", _FP16, "says off; autocast was float16"),
        (argument("--precision", default="high"), "", SEEN, None),
        (argument("--fp16", action="store_true"), "--fp16", _BF16, "autocast was bfloat16"),
    ],
)
def test_precisions_that_are_not_what_was_seen(
    parser: argparse.ArgumentParser, words: str, seen: ObservedSettings, says: str | None
) -> None:
    found = read(parser, *words.split(), seen=seen)
    if says is None:
        assert (found.found, found.left) == ((), ())
    else:
        assert says in left(found, "amp")


@pytest.mark.slow
def test_a_launchers_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("accelerate")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    Path("train.py").write_text("")
    before = ("accelerate", "launch", "--num_processes", "1", "--mixed_precision=bf16", "train.py")
    parser = argument("--mixed_precision", default=None)
    parser.add_argument("--batch_size", type=int, default=8)
    found = read(parser, seen=_BF16, before=before)
    assert found.command.line(amp="no", batch_size="9") == (
        "accelerate launch --num_processes 1 --mixed_precision=no train.py --batch_size=9"
    )


# -- what follows from options -----------------------------------------------------------------


def test_refused_options_are_taken_out_again() -> None:
    parser = argument("--batch_size", type=int, default=8)
    parser.add_argument("--workers", type=int, default=0)
    found = read(parser, "--batch_size", "8")
    rest = found.without({"batch_size": "the DataLoader's is 8"})
    assert rest.command.fill(num_workers="2") == [*TOOL, "--batch_size", "8", "--workers=2"]
    assert rest.command.present == {"num_workers": "0"}
    assert left(rest, "batch_size") == "the DataLoader's is 8"


@pytest.mark.parametrize(
    ("seen_accum", "chosen", "values", "most"),
    [(1, 64, {}, None), (1, 2, {"grad_accum": "4"}, None), (4, 16, {"grad_accum": "2"}, 32)],
)
def test_accumulation_that_the_user_has_not_marked(
    seen_accum: int, chosen: int, values: dict[str, str], most: int | None
) -> None:
    """One who does not accumulate lets the effective batch grow; it is kept where it shrinks."""
    parser = argument("--accum_iter", type=int, default=seen_accum)
    seen = dataclasses.replace(SEEN, accumulation=seen_accum)
    found = read(parser, seen=seen)
    makeup = StepMakeup(8, seen_accum, 8 * seen_accum, "DataLoader", seen_accum)
    kept = accumulation_for(found.command, makeup, 8, chosen)
    assert (kept.values, kept.action) == (values, "")
    assert EffectiveBatch(found.command, makeup, 8).most == most


@pytest.mark.parametrize(
    ("name", "value", "changes", "had"),
    [
        ("batch_size", "8", {}, True),
        ("batch_size", "16", {}, False),
        ("num_workers", "2", {"loader": LoaderSettings(2)}, True),
        ("num_workers", "2", {}, False),
        ("prefetch_factor", "4", {}, None),
        ("prefetch_factor", "4", {"loader": LoaderSettings(2)}, False),
        ("prefetch_factor", "None", {"loader": LoaderSettings(2)}, None),
        ("pin_memory", "true", {"loader": LoaderSettings(0, pin_memory=True)}, True),
        ("pin_memory", "true", {}, False),
        ("persistent_workers", "true", {}, None),
        ("amp", "bf16", {"autocast": "float16"}, False),
        ("amp", "bf16-mixed", {"autocast": "bfloat16"}, True),
        ("amp", "true", {"autocast": "float16"}, True),
        ("amp", "no", {}, True),
        ("amp", "no", {"autocast": "float16"}, False),
        ("grad_accum", "2", {}, False),
        ("grad_accum", "2", {"accumulation": None}, None),
        ("num_workers", "2", {"loader": None}, None),
    ],
)
def test_effects(name: str, value: str, changes: dict[str, Any], had: bool | None) -> None:
    effect = _effect(name, value, dataclasses.replace(SEEN, **changes))
    assert effect.had is had
    assert "\n" not in effect.seen and effect.seen
