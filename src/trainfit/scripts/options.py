"""The options of a script's own command line, and their values in this run."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import sys
from collections.abc import Callable, Iterable, Sequence
from types import ModuleType
from typing import Any, Final

from trainfit.results.runs.script import ScriptOption
from trainfit.scripts.option_parsers import (
    of_absl,
    of_argparse,
    of_click,
    of_fire,
    of_globals,
    of_omegaconf,
    of_tyro,
)
from trainfit.simgpu.patching import PatchSet

# ---
# The options of a script's own command line, and their values in this run.
#
# Told by the parser that reads ``sys.argv``: argparse's (and so Transformers', jsonargparse's and
# Lightning's), click's, draccus', absl's, tyro's, Fire's, Hydra's and OmegaConf's; or, where none
# does, by the global variables that words override. A library's parser that is given other words,
# and a launcher's, do not count. The script notices nothing of it: whatever goes wrong here, its
# options are not known.


#: click, and the copy of it that comes with typer.
_CLICK: Final = ("click.core", "typer._click.core")
_DRACCUS: Final = "draccus.argparsing"
_ABSL: Final = "absl.flags"
_CONFIGARGPARSE: Final = "configargparse"
_TYRO: Final = "tyro._cli"
_FIRE: Final = "fire.core"
_HYDRA: Final = "hydra.core.utils"
_OMEGACONF: Final = "omegaconf.omegaconf"
#: Options beyond which they are left out: none has so many.
_MOST: Final = 2000


class OptionsWatch:
    """Notes the options of a script as they are parsed, whenever a parser is imported."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, ...], ScriptOption] = {}
        self._saw_words = False

    def install(self, patches: PatchSet) -> None:
        """Watch from now on, until ``patches`` is restored."""
        self._patch_argparse(patches)
        for name, patch in (
            *((name, self._patch_click) for name in _CLICK),
            (_DRACCUS, self._patch_draccus),
            (_TYRO, self._patch_tyro),
            (_FIRE, self._patch_fire),
            (_HYDRA, self._patch_hydra),
            (_OMEGACONF, self._patch_omegaconf),
        ):
            patches.when_imported(name, functools.partial(patch, patches))

    def options(self) -> tuple[ScriptOption, ...]:
        """The options seen so far."""
        absl = sys.modules.get(_ABSL)
        if absl is not None:
            self._note(_words(), lambda words: of_absl(_parsed_flags(absl), words))
        if not self._found:
            self._note(_words(), lambda words: of_globals(vars(sys.modules["__main__"]), words))
        return tuple(self._found.values())[:_MOST]

    # -- parsers -----------------------------------------------------------------------------

    def _patch_argparse(self, patches: PatchSet) -> None:
        # What all ways to parse come to, jsonargparse's too, which has no parse_known_args.
        parse = getattr(argparse.ArgumentParser, "_parse_known_args", None)
        if parse is None:  # another version's, of which nothing is known
            return
        watch = self

        @functools.wraps(parse)
        def _parse_known_args(own: Any, arg_strings: Any, *args: Any, **kwargs: Any) -> Any:
            given = watch._begin(arg_strings, adds=_adds_words(own))
            parsed = parse(own, arg_strings, *args, **kwargs)
            watch._note(given, lambda words: of_argparse(own, words, parsed[0]))
            return parsed

        patches.set(argparse.ArgumentParser, "_parse_known_args", _parse_known_args)

    def _patch_click(self, patches: PatchSet, module: ModuleType) -> None:
        command = getattr(module, "Command", None)
        parse = getattr(command, "parse_args", None)
        if parse is None:  # another version's, of which nothing is known
            return
        watch = self

        @functools.wraps(parse)
        def parse_args(own: Any, ctx: Any, args: Any) -> Any:
            given = watch._begin(args)
            rest = parse(own, ctx, args)
            watch._note(given, lambda words: of_click(ctx, words))
            return rest

        patches.set(command, "parse_args", parse_args)

    def _patch_draccus(self, patches: PatchSet, module: ModuleType) -> None:
        """draccus' argparse knows no defaults; what it makes of the words does."""
        parser_type = getattr(module, "ArgumentParser", None)
        if parser_type is None or not hasattr(parser_type, "parse_known_args"):
            return
        parse = parser_type.parse_known_args
        watch = self

        @functools.wraps(parse)
        def parse_known_args(
            own: Any, args: Any = None, namespace: Any = None, **kwargs: Any
        ) -> Any:
            words = list(sys.argv[1:] if args is None else args)
            given = watch._begin(words)
            parsed = parse(own, words, namespace, **kwargs)
            watch._note(given, lambda words: of_argparse(own.parser, words, parsed[0]))
            return parsed

        patches.set(parser_type, "parse_known_args", parse_known_args)

    def _patch_tyro(self, patches: PatchSet, module: ModuleType) -> None:
        """tyro calls a function with what it has read, and makes a dataclass of it."""
        read, parse = getattr(module, "cli", None), getattr(module, "_cli_impl", None)
        if read is None or parse is None:
            return
        watch = self

        def note(found: Any, args: Any) -> None:
            made = found[0] if isinstance(found, tuple) else found
            if isinstance(made, functools.partial):  # of the function, which is called next
                made = made.keywords
            elif not dataclasses.is_dataclass(made):
                return
            watch._note(watch._begin(args), lambda words: of_tyro(made, words))

        @functools.wraps(parse)
        def _cli_impl(f: Any, **kwargs: Any) -> Any:
            found = parse(f, **kwargs)
            note(found, kwargs.get("args"))
            return found

        @functools.wraps(read)
        def cli(f: Any, **kwargs: Any) -> Any:
            found = read(f, **kwargs)
            if isinstance(f, type):
                note(found, kwargs.get("args"))
            return found

        patches.set(module, "_cli_impl", _cli_impl)
        patches.set(module, "cli", cli)

    def _patch_fire(self, patches: PatchSet, module: ModuleType) -> None:
        make = getattr(module, "_MakeParseFn", None)
        if make is None:
            return
        watch = self

        @functools.wraps(make)
        def _make_parse_fn(function: Any, metadata: Any) -> Any:
            parse = make(function, metadata)

            def noted(words: Any) -> Any:
                given = watch._begin(words)
                found = parse(words)

                def read(words: list[str]) -> Iterable[ScriptOption]:
                    positional, keywords = found[0]
                    names = module.inspectutils.GetFullArgSpec(function).args
                    values = {**dict(zip(names, positional, strict=False)), **keywords}
                    return of_fire(values, words)

                watch._note(given, read)
                return found

            return noted

        patches.set(module, "_MakeParseFn", _make_parse_fn)

    def _patch_hydra(self, patches: PatchSet, module: ModuleType) -> None:
        """The configuration as Hydra has composed it, its own part left out."""
        run = getattr(module, "run_job", None)
        if run is None:
            return
        watch = self

        # Not called run_job: Hydra looks for that name where it shortens a traceback.
        @functools.wraps(run)
        def run_noted(task_function: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
            def read(words: list[str]) -> Iterable[ScriptOption]:
                found = of_omegaconf(config, words)
                return (option for option in found if not option.name.startswith("hydra."))

            watch._note(_words(), read)
            return run(task_function, config, *args, **kwargs)

        patches.set(module, "run_job", run_noted)

    def _patch_omegaconf(self, patches: PatchSet, module: ModuleType) -> None:
        """What the script merges with the words that it had OmegaConf read."""
        kind = getattr(module, "OmegaConf", None)
        if kind is None:
            return
        read, merge = kind.from_dotlist, kind.merge
        watch = self
        #: The configuration made of the script's words, and these.
        made_of: list[tuple[Any, list[str]]] = []

        # What from_cli calls, and scripts that leave words to another parser first (torchtune).
        @functools.wraps(read)
        def from_dotlist(dotlist: Any) -> Any:
            made = read(dotlist)
            words = watch._begin(dotlist)
            if words is not None:
                made_of[:] = [(made, words)]
            return made

        @functools.wraps(merge)
        def merge_noted(*configs: Any) -> Any:
            merged = merge(*configs)
            for made, words in made_of:
                if any(config is made for config in configs):
                    watch._note(words, lambda given: of_omegaconf(merged, given))
            return merged

        patches.set(kind, "from_dotlist", staticmethod(from_dotlist))
        patches.set(kind, "merge", staticmethod(merge_noted))

    # -- notes -------------------------------------------------------------------------------

    def _begin(self, given: Iterable[str] | None, *, adds: bool = False) -> list[str] | None:
        """The words that are parsed (``None``: those of ``sys.argv``); ``None`` where they are not
        the script's. Of a parser that ``adds`` a file's words, those of the command alone."""
        with contextlib.suppress(Exception):
            words = _words() if given is None else list(given)
            if self._is_scripts(words):
                return words
            own, rest = _words(), iter(words)
            if adds and all(any(word == other for other in rest) for word in own):
                self._saw_words = True
                return own
        return None

    def _note(
        self, words: list[str] | None, read: Callable[[list[str]], Iterable[ScriptOption]]
    ) -> None:
        """Keep what ``read`` gives of the script's words; an odd parser's failure must not reach
        the script."""
        if words is None:
            return
        with contextlib.suppress(Exception):
            for option in read(words):
                self._found[option.flags or option.off] = option

    def _is_scripts(self, given: Sequence[str]) -> bool:
        """Is it the script's command line that is parsed: some words of it in their order?

        No words at all are, where there are none, or another parser of the script has taken them.
        """
        words = _words()
        if not given:
            return not words or self._saw_words
        rest = iter(words)
        is_part = all(any(word == other for other in rest) for word in given)
        self._saw_words = self._saw_words or is_part
        return is_part


def _words() -> list[str]:
    """The script's arguments, without telling that they are looked at (a stem waits for that)."""
    try:
        return list.__getitem__(sys.argv, slice(1, None))
    except TypeError:  # the script has put something else there
        return list(sys.argv)[1:]


def _adds_words(parser: argparse.ArgumentParser) -> bool:
    """Does the parser write what a configuration file and the environment say as words, next to
    those of the command, which go before them?"""
    return any(each.__module__ == _CONFIGARGPARSE for each in type(parser).__mro__)


def _parsed_flags(absl: ModuleType) -> Any:
    flags: Any = absl.FLAGS
    return flags if flags.is_parsed() else ()
