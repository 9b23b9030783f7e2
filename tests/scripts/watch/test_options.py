"""What a run notes of the script's own options, as its parser reads ``sys.argv``."""

from __future__ import annotations

import argparse
import dataclasses
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers_cli import environment
from trainfit.results.runs.script import ScriptOption
from trainfit.scripts.option_parsers import of_fire, of_globals, place_of
from trainfit.scripts.options import OptionsWatch
from trainfit.scripts.template_process import Arguments
from trainfit.simgpu.patching import PatchSet


@pytest.fixture
def watch() -> Iterator[OptionsWatch]:
    patches, watch = PatchSet(), OptionsWatch()
    watch.install(patches)
    try:
        yield watch
    finally:
        patches.restore()


@pytest.fixture
def run(
    watch: OptionsWatch, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, ScriptOption]]:
    """Parses as a script with these words would; its options by their names."""

    def run(parse: Callable[[], Any], *words: str) -> dict[str, ScriptOption]:
        monkeypatch.setattr(sys, "argv", ["train.py", *words])
        parse()
        return {option.name: option for option in watch.options()}

    return run


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", "--batch-size", type=int, default=8)
    parser.add_argument("--amp", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--pin-mem", action="store_true")
    parser.add_argument("--no-pin-mem", action="store_false", dest="pin_mem")
    parser.set_defaults(pin_mem=True)
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--bf16", type=str, nargs="?", const=True, default=False)
    parser.add_argument("--lrs", nargs="+", type=float)
    parser.add_argument("words", nargs="*")
    return parser


class Configured(argparse.ArgumentParser):
    """As ConfigArgParse's: what its file says are words after those of the command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        own = sys.argv[1:]
        filed = [] if any("N_rand" in word for word in own) else ["--N_rand", "1024"]
        return super().parse_known_args([*own, *filed], namespace)


@pytest.mark.parametrize("words", [("--lr", "2"), ("--N_rand=512",), ()])
def test_words_that_a_parser_adds_of_a_file(
    run: Any, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, given = Configured(), "--N_rand=512" in words
    made.add_argument("--N_rand", type=int, default=4096)
    made.add_argument("--lr", type=float, default=1.0)
    if not given:  # the words of another parser may be none of the script's
        assert not run(made.parse_args, *words)
    monkeypatch.setattr(Configured, "__module__", "configargparse")
    found = run(made.parse_args, *words)["N_rand"]
    assert (found.value, found.given) == ("512" if given else "1024", given)


def test_argparse(run: Any) -> None:
    found = run(parser().parse_args, "--batch-size=4", "--no-amp", "--bf16", "--", "--amp")
    assert found["batch_size"] == ScriptOption(
        ("-b", "--batch-size"), "batch_size", "4", True, default="8", type="int"
    )
    assert found["amp"] == ScriptOption(
        ("--amp",), "amp", "False", True, switch=True, default="True", off=("--no-amp",)
    )
    pin = found["pin_mem"]
    assert (pin.flags, pin.off, pin.value, pin.given) == (
        ("--pin-mem",), ("--no-pin-mem",), "True", False,
    )  # fmt: skip
    assert found["precision"].choices == ("no", "bf16")
    assert (found["bf16"].value, found["bf16"].bare, found["bf16"].given) == ("True", True, True)
    assert "lrs" not in found and "words" not in found


def test_what_a_configuration_gives_is_the_default(run: Any) -> None:
    def parse() -> None:
        known, rest = parser().parse_known_args()
        again = parser()
        again.set_defaults(batch_size=known.batch_size * 2)
        again.parse_args(rest)

    found = run(parse)
    assert (found["batch_size"].value, found["batch_size"].default) == ("16", "16")


def test_other_words_than_the_scripts_do_not_count(run: Any) -> None:
    def parse() -> None:
        parser().parse_args(["--batch-size=4"])
        parser().parse_args([])

    assert run(parse, "--lr=1") == {}


def test_a_second_parser_of_what_the_first_left(run: Any) -> None:
    def parse() -> None:
        first = argparse.ArgumentParser()
        first.add_argument("--config")
        rest = first.parse_known_args()[1]
        parser().parse_args(rest)

    found = run(parse, "--config", "a.yaml", "--amp", "-b", "2")
    assert (found["batch_size"].value, found["config"].value) == ("2", "a.yaml")
    assert run(parse, "--config=a.yaml")["batch_size"].value == "8"


def test_options_before_a_subcommand(run: Any) -> None:
    def parse() -> None:
        main = argparse.ArgumentParser()
        main.add_argument("--workers", type=int, default=2)
        train = main.add_subparsers(dest="what").add_parser("train")
        train.add_argument("--batch_size", type=int, default=8)
        main.parse_args()

    for words in (("train",), ("--workers=3", "train", "--batch_size", "4")):
        found = run(parse, *words)
        assert (found["workers"].ahead, found["batch_size"].ahead) == (True, False)
        assert found["batch_size"].given == (len(words) > 1)


def test_a_script_that_refuses_its_words_says_so_as_ever(
    run: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        run(parser().parse_args, "--nonsense")
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err


def test_an_odd_parser_is_no_concern_of_the_scripts(run: Any) -> None:
    class Odd(argparse.ArgumentParser):
        def get_default(self, dest: str) -> Any:
            raise RuntimeError("not to be asked")

    def parse() -> None:
        odd = Odd()
        odd.add_argument("--batch_size", default=8)
        assert odd.parse_args().batch_size == 8

    assert run(parse) == {}


def test_the_arguments_are_not_looked_at_for_this(
    watch: OptionsWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stem forks its runs when they are; a library's own parser must not be taken for that."""
    looks: list[int] = []
    arguments = Arguments(["train.py", "--batch-size=4"], lambda: looks.append(1))
    monkeypatch.setattr(sys, "argv", arguments)
    parser().parse_args(["--batch-size=5"])
    assert watch.options() == () and not looks
    parser().parse_args()
    assert looks == [1] and watch.options()[0].value == "4"


def test_nothing_is_left_behind() -> None:
    before = vars(argparse.ArgumentParser)["_parse_known_args"]
    patches, watch = PatchSet(), OptionsWatch()
    watch.install(patches)
    assert vars(argparse.ArgumentParser)["_parse_known_args"] is not before
    hooks = len(sys.meta_path)
    patches.restore()
    assert vars(argparse.ArgumentParser)["_parse_known_args"] is before
    assert len(sys.meta_path) <= hooks


def test_click(run: Any) -> None:
    click = pytest.importorskip("click")

    @click.group()
    @click.option("--seed", default=1)
    def main(seed: int) -> None: ...

    @main.command()
    @click.option("-b", "--batch-size", default=8)
    @click.option("--amp/--no-amp", default=True)
    @click.option("--pin", is_flag=True)
    @click.option("--lrs", multiple=True)
    def train(**_: Any) -> None: ...

    found = run(lambda: main(standalone_mode=False), "--seed", "3", "train", "-b", "4", "--no-amp")
    batch, amp = found["batch_size"], found["amp"]
    assert (batch.flags, batch.value, batch.given, batch.default) == (
        ("-b", "--batch-size"), "4", True, "8",
    )  # fmt: skip
    assert (amp.flags, amp.off, amp.switch, amp.value) == (("--amp",), ("--no-amp",), True, "False")
    assert (found["seed"].ahead, batch.ahead) == (True, False)
    assert (found["pin"].switch, found["pin"].value) == (True, "False")
    assert "lrs" not in found


def test_draccus_whose_defaults_are_in_its_dataclasses(run: Any) -> None:
    draccus = pytest.importorskip("draccus")
    # Its types are types, no names of them.
    policy = dataclasses.make_dataclass("Policy", [("use_amp", bool, False)])
    config = dataclasses.make_dataclass(
        "Config",
        [("batch_size", int, 8), ("policy", policy, dataclasses.field(default_factory=policy))],
    )
    found = run(lambda: draccus.parse(config_class=config), "--policy.use_amp=true")
    assert (found["batch_size"].value, found["batch_size"].given) == ("8", False)
    assert (found["policy.use_amp"].value, found["policy.use_amp"].given) == ("True", True)


def test_transformers(run: Any) -> None:
    transformers = pytest.importorskip("transformers.hf_argparser")
    arguments = dataclasses.make_dataclass(
        "Arguments", [("train_batch_size", int, 8), ("bf16", bool, False), ("pin", bool, True)]
    )
    parse = transformers.HfArgumentParser(arguments).parse_args_into_dataclasses
    found = run(parse, "--train_batch_size", "4", "--no_pin")
    assert (found["train_batch_size"].value, found["train_batch_size"].given) == ("4", True)
    assert found["train_batch_size"].flags == ("--train_batch_size", "--train-batch-size")
    assert (found["bf16"].bare, found["bf16"].value) == (True, "False")
    pin = found["pin"]
    assert (pin.flags, pin.off, pin.value, pin.given) == (
        ("--pin",), ("--no_pin", "--no-pin"), "False", True,
    )  # fmt: skip


TRAIN = """
defaults: [{data: images}, _self_]
half: ${data.batch_size}
unset: ???
model: {layers: [1, 2], amp: false, name: null}
"""


def test_hydra(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hydra = pytest.importorskip("hydra")
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "train.yaml").write_text(TRAIN)
    (tmp_path / "conf" / "data" / "images.yaml").write_text("batch_size: 8\nnum_workers: 2\n")
    monkeypatch.chdir(tmp_path)
    seen = []
    main = hydra.main(version_base=None, config_path=str(tmp_path / "conf"), config_name="train")
    quiet = ("hydra.run.dir=.", "hydra.output_subdir=null", "hydra/job_logging=none")
    found = run(main(seen.append), *quiet, "data.batch_size=4", "++model.name=x")
    assert [each.data.batch_size for each in seen] == [4]
    batch, workers = found["data.batch_size"], found["data.num_workers"]
    assert (batch.flags, batch.value, batch.given) == (("data.batch_size",), "4", True)
    assert (workers.value, workers.given, workers.default) == ("2", False, "2")
    assert (found["model.amp"].value, found["model.name"].given) == ("False", True)
    # Another's value, none, a list, and Hydra's own.
    assert not {"half", "unset", "model.layers"} & {*found}
    assert not any(name.startswith("hydra.") for name in found)


def test_omegaconf_of_the_scripts_words(run: Any) -> None:
    omegaconf = pytest.importorskip("omegaconf").OmegaConf
    base = omegaconf.create({"data": {"batch_size": 8, "num_workers": 2}, "seed": 1})

    def merged() -> None:
        omegaconf.merge(base, {"data": {"num_workers": 3}})  # not with the words
        made = omegaconf.merge(base, omegaconf.from_cli())
        assert made.data.batch_size == 4

    found = run(merged, "data.batch_size=4")
    assert (found["data.batch_size"].value, found["data.batch_size"].given) == ("4", True)
    assert (found["data.num_workers"].value, found["data.num_workers"].given) == ("2", False)


def test_omegaconf_of_what_another_parser_left(run: Any) -> None:
    """torchtune: argparse has --config, OmegaConf the rest, which may be nothing."""
    omegaconf = pytest.importorskip("omegaconf").OmegaConf

    def merged() -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--config")
        rest = parser.parse_known_args()[1]
        base = omegaconf.create({"batch_size": 2, "seed": 1})
        omegaconf.merge(base, omegaconf.from_dotlist(rest))

    found = run(merged, "--config", "tt.yaml")
    assert (found["batch_size"].value, found["batch_size"].given) == ("2", False)
    found = run(merged, "--config", "tt.yaml", "batch_size=4")
    assert (found["batch_size"].value, found["batch_size"].given) == ("4", True)


@pytest.mark.parametrize("kind", ["dataclass", "function"])
def test_tyro(run: Any, watch: OptionsWatch, kind: str) -> None:
    tyro = pytest.importorskip("tyro")
    data = dataclasses.make_dataclass("Data", [("batch_size", int, 8), ("pin_memory", bool, True)])
    config = dataclasses.make_dataclass(
        "Config",
        [("data", data, dataclasses.field(default_factory=data)), ("amp", bool, False)],
    )

    def train(data: Any, amp: bool = False) -> None:
        known.extend(each.name for each in watch.options())

    train.__annotations__.update(data=data, amp=bool)
    known: list[str] = []
    words = ("--data.batch-size", "4", "--amp", "--data.no-pin-memory")
    found = run(lambda: tyro.cli(config if kind == "dataclass" else train), *words)
    # A function is what trains, and may never return.
    assert set(known) == ({*found} if kind == "function" else set())
    batch, amp, pin = found["data.batch_size"], found["amp"], found["data.pin_memory"]
    assert batch.flags == ("--data.batch-size", "--data.batch_size")
    assert (batch.value, batch.given) == ("4", True)
    assert (amp.flags, amp.off, amp.value, amp.given) == (("--amp",), ("--no-amp",), "True", True)
    assert (pin.off, pin.value, pin.given) == (("--data.no-pin-memory",), "False", True)


def test_fire(run: Any, watch: OptionsWatch) -> None:
    fire = pytest.importorskip("fire")
    known: list[str] = []

    def train(
        batch_size: int = 8, amp: bool = False, *, pin_mem: bool = True, lrs: Any = ()
    ) -> None:
        known.extend(each.name for each in watch.options())

    found = run(lambda: fire.Fire(train), "--batch-size", "4", "--amp", "--nopin_mem")
    batch, amp, pin = found["batch_size"], found["amp"], found["pin_mem"]
    assert batch.flags == ("--batch_size", "--batch-size")
    assert (batch.value, batch.given) == ("4", True)
    assert (amp.bare, amp.off, amp.value, amp.given) == (True, ("--noamp",), "True", True)
    assert (pin.value, pin.given) == ("False", True)
    # The function is what trains, and may never return.
    assert set(known) == {*found} and "lrs" not in found


@pytest.mark.parametrize("words", [["4"], ["--amp", "True", "4"], ["--batch_size=8", "x"]])
def test_a_value_of_fires_without_a_name_leaves_all_alone(words: list[str]) -> None:
    assert not [*of_fire({"batch_size": 4, "amp": True}, words)]
    assert [*of_fire({"batch_size": 4, "amp": True}, words[:-1])]


GLOBALS = {
    "batch_size": 12, "compile": False, "rate": 0.001, "data": "owt", "wandb": None, "_own": 1,
    "torch": types, "betas": (0.9, 0.95),
}  # fmt: skip


@pytest.mark.parametrize("words", [["config/train.py"], ["--compile=False"], ["--rate=1e-3"]])
def test_global_variables_that_words_override(words: list[str]) -> None:
    found = {each.name: each for each in of_globals(GLOBALS, words)}
    assert {*found} == {"batch_size", "compile", "rate", "data"}
    batch = found["batch_size"]
    assert (batch.flags, batch.value, batch.given) == (("--batch_size",), "12", False)
    assert sum(each.given for each in found.values()) == (words != ["config/train.py"])


@pytest.mark.parametrize(
    "words", [[], ["run"], ["--compile=True"], ["--other=1"], ["--compile"], ["batch_size=12"]]
)
def test_words_that_override_no_global_variable(words: list[str]) -> None:
    assert not [*of_globals(GLOBALS, words)]


def test_a_parser_knows_better_than_global_variables(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "workers", 4, raising=False)
    assert "workers" not in run(lambda: parser().parse_known_args(), "--workers=4", "x.py")


def test_global_variables_of_a_run(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["__main__"], "workers", 4, raising=False)
    assert run(lambda: None, "--workers=4")["workers"].given


class _Registry(dict[str, Any]):
    """absl's FlagValues, as far as it is looked at: a mapping of names to flags."""

    def is_parsed(self) -> bool:
        return True


def _flag(name: str, value: Any, default: Any, kind: str, short: str | None = None) -> Any:
    """absl's Flag: ``vars`` of absl-py 2.5's, as far as they are looked at."""
    return types.SimpleNamespace(
        name=name,
        value=value,
        default=default,
        boolean=kind == "bool",
        short_name=short,
        parser=types.SimpleNamespace(),
        flag_type=lambda: kind,
    )


def test_absl(watch: OptionsWatch, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = _Registry(
        batch_size=_flag("batch_size", 4, 8, "int", "b"), amp=_flag("amp", False, True, "bool")
    )
    monkeypatch.setitem(sys.modules, "absl.flags", types.SimpleNamespace(FLAGS=flags))
    monkeypatch.setattr(sys, "argv", ["train.py", "--noamp", "-b", "4"])
    found = {option.name: option for option in watch.options()}
    assert (found["batch_size"].value, found["batch_size"].given) == ("4", True)
    assert (found["amp"].value, found["amp"].off, found["amp"].given) == (
        "False", ("--noamp",), True,
    )  # fmt: skip


# -- places in words ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "at", "value_at", "start"),
    [
        (["--batch-size", "8"], 0, 1, 0),
        (["x", "--batch-size=8"], 1, 1, 13),
        (["--batch=8"], 0, 0, 8),
        (["-b", "8"], 0, 1, 0),
        (["-b8"], 0, 0, 2),
        (["-b=8"], 0, 0, 3),
        (["-b", "4", "--batch-size", "8"], 2, 3, 0),
    ],
)
def test_places(words: list[str], at: int, value_at: int, start: int) -> None:
    flags, known = ("-b", "--batch-size"), ("-b", "--batch-size", "--bits", "-x")
    place = place_of(words, flags, known)
    assert place is not None
    assert (place.at, place.value_at, place.start) == (at, value_at, start)
    assert words[value_at][start:] == "8"


@pytest.mark.parametrize(
    "words", [[], ["--", "-b", "8"], ["--b", "8"], ["--batches=8"], ["batch-size=8"], ["-x8"]]
)
def test_words_that_are_not_the_option(words: list[str]) -> None:
    assert place_of(words, ("-b", "--batch-size"), ("--bits", "--batch-size", "-b")) is None


def test_options_without_a_value() -> None:
    switch = place_of(["--amp", "8"], ("--amp",), switch=True)
    assert switch is not None and switch.value_at is None
    for words, value_at in ((["--bf16", "--x"], None), (["--bf16", "True"], 1), (["--bf16"], None)):
        place = place_of(words, ("--bf16",), bare=True)
        assert place is not None and place.value_at == value_at


@pytest.mark.slow
def test_a_scripts_annotations_are_its_own(tmp_path: Path) -> None:
    """Libraries make options of them: draccus, typer. What compiles the script has other ones."""
    script = tmp_path / "script.py"
    script.write_text("def train(batch_size: int): ...\nprint(train.__annotations__)\n")
    code = (
        "import sys; from trainfit.results.runs.trace import Target; "
        "from trainfit.scripts.execute import execute; "
        "execute(Target('script', sys.argv[1], ()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(script)],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.stdout == "{'batch_size': <class 'int'>}\n", done.stderr
