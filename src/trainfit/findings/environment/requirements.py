"""Versions of packages that a repository asks for, and which of the installed ones they exclude.

They are read where people look for them: requirements*.txt, pyproject.toml, setup.py and setup.cfg,
conda's environment*.yml, and a `pip install name` in README.md or INSTALL.md.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.metadata
import os
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

#: Files of a folder that name versions, those first that pip installs by.
_FILES: Final = (
    *("requirements*.txt", "requirements/*.txt", "pyproject.toml", "setup.py", "setup.cfg"),
    *("*env*.y*ml", "conda*.y*ml", "INSTALL*.md", "get_started*.md", "README*.md"),
)
#: Folders above the script's that are looked at.
_ABOVE: Final = 3
#: Bytes of a file: what is longer is no list of requirements.
_LARGEST: Final = 400_000
_NAME: Final = r"[A-Za-z][A-Za-z0-9._-]*"
_CLAUSE: Final = r"(?:===?|~=|>=|<=|!=|<|>)\s*v?\d[\w.+!-]*\*?"
#: "numpy>=1.20,<2", "gymnasium[mujoco]==0.29.1 ; python_version > '3.7'".
_REQUIREMENT: Final = re.compile(
    rf"(?<![\w./-])(?P<name>{_NAME})(?:\[[^\]]*\])?\s*\(?(?P<spec>{_CLAUSE}(?:\s*,\s*{_CLAUSE})*)"
)
#: "tqdm", "tqdm  # a bar", "tqdm; python_version > '3.7'".
_UNPINNED: Final = re.compile(rf"\s*(?P<name>{_NAME})(?:\[[^\]]*\])?\s*(?:[#;].*)?$")
#: conda's "- pytorch=1.7.1=py3.8_cuda11.0", where one "=" means "and what begins with it".
_OF_CONDA: Final = re.compile(rf"^\s*-\s*(?:[\w-]+::)?(?P<name>{_NAME})=(?P<version>\d[\w.]*)")
#: Text in a list of Python or of a page: what stands in quotes, what pip is told.
_QUOTED: Final = re.compile(r"[\"']([^\"'\n]+)[\"']")
#: A page's line that tells of pip, up to where a shell's command ends; it is a command of its own
#: if no more than a quote, a prompt, a list's mark or Python stands before it.
_PIP: Final = re.compile(r"(?P<before>.*?)pip3? install(?P<words>[^`;&|#]*)")
_BEFORE_PIP: Final = re.compile(r"[\s`$>!%*-]*(?:(?:sudo|uv|python[\d.]*|-m)\s+)*")
#: Packages that conda and pip call otherwise.
_SAME: Final = {"pytorch": "torch", "opencv": "opencv-python", "tensorboard-x": "tensorboardx"}


#: Names of packages that differ from their module's.
_LIKE: Final = (
    *("py{}", "py-{}", "python-{}", "{}-python", "{}-py", "{}lib"),
    *("pytorch-{}", "{}-pytorch", "torch-{}", "{}-torch"),
)


@dataclass(frozen=True)
class Asked:
    """A package that a file of the repository asks for; ``version`` is a specifier, or empty."""

    package: str
    version: str
    file: str


@dataclass(frozen=True)
class Unmet(Asked):
    """A package that a file asks for, and the installed version, which it excludes."""

    installed: str


def unmet(modules: Iterable[str], folder: Path) -> Unmet | None:
    """The first of these modules whose installed version the repository around a folder excludes;
    ``None`` where none is, or nothing names a version of one."""
    for module in dict.fromkeys(modules):
        for name, installed in _installed(module):
            # what stands first counts: a README may tell of an older version
            asked = next((each for each in _asked(name, folder) if each.version), None)
            if asked is not None and not meets(installed, asked.version):
                return Unmet(name, asked.version, asked.file, installed)
    return None


def unmet_by(asking: str, module: str) -> Unmet | None:
    """The version of ``module`` that the installed package of the module ``asking`` asks for, where
    the installed one is excluded."""
    installed = dict(_installed(module))
    for each in wanted_by(asking):
        for name, version in installed.items():
            if plain_name(name) == plain_name(each.package) and not meets(version, each.version):
                return Unmet(each.package, each.version, each.file, version)
    return None


def wanted_by(asking: str) -> Iterator[Asked]:
    """What the installed package of the module ``asking`` asks for here, without its extras."""
    from packaging.requirements import InvalidRequirement, Requirement

    for name, version in _installed(asking):
        for line in importlib.metadata.requires(name) or ():
            with contextlib.suppress(InvalidRequirement):
                each = Requirement(line)
                if each.marker is None or each.marker.evaluate({"extra": ""}):
                    yield Asked(each.name, str(each.specifier), f"{name} {version}")


def asked_for(package: str, folder: Path) -> Asked | None:
    """What the repository around a folder asks for of a package; ``None``: it names it nowhere."""
    found = list(_asked(package, folder))
    return next((each for each in found if each.version), next(iter(found), None))


def asked_like(module: str, folder: Path) -> Asked | None:
    """What the repository asks for under a name that a package of ``module`` often has (chess is
    python-chess's), and that is not installed: an installed one would have brought the module."""
    name = plain_name(module)
    found = (asked_for(form.format(name), folder) for form in _LIKE)
    return next((each for each in found if each and not is_installed(each.package)), None)


def meets(installed: str, asked: str) -> bool:
    """Does a version meet all clauses of a specifier? One that cannot be read is met."""
    # A watched run's own environment may not have it, and does not need it.
    from packaging.specifiers import InvalidSpecifier, SpecifierSet
    from packaging.version import InvalidVersion

    try:
        return SpecifierSet(asked).contains(installed, prereleases=True)
    except (InvalidSpecifier, InvalidVersion):
        return True


def _numbers(version: str) -> tuple[int, ...]:
    """The release of a version, without what marks a build: of 2.1.0+cu118, of 1.0rc2."""
    match = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def plain_name(name: str) -> str:
    """A package's name as pip compares it."""
    plain = re.sub(r"[-_.]+", "-", name).lower()
    return _SAME.get(plain, plain)


def _installed(module: str) -> Iterator[tuple[str, str]]:
    """The packages that a module is of, with their versions."""
    try:
        yield module, importlib.metadata.version(module)
        return
    except importlib.metadata.PackageNotFoundError:
        pass  # it is of a package of another name
    for name in dict.fromkeys(_distributions().get(module, [])):
        yield name, importlib.metadata.version(name)


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    return importlib.metadata.packages_distributions()


def is_installed(package: str) -> bool:
    """Is there a package of this name, for the Python that runs here?"""
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def installed_version(module: str) -> str:
    """The version of the package that a module is of; empty where it is of none."""
    return next((version for _, version in _installed(module)), "")


def _asked(name: str, folder: Path) -> Iterator[Asked]:
    """What the files of the nearest folder with a list of requirements say of a package: there the
    repository begins."""
    for at in (folder, *list(folder.parents)[:_ABOVE]):
        files = [file for pattern in _FILES for file in sorted(at.glob(pattern))]
        for file in files:
            for each, version in _read(file):
                if plain_name(each) == plain_name(name):
                    yield Asked(name, version, os.path.relpath(file))
        if (at / ".git").exists() or any(file.suffix != ".md" for file in files):
            return


def _read(file: Path) -> Iterator[tuple[str, str]]:
    try:
        if file.stat().st_size > _LARGEST:
            return
        text = file.read_text(errors="replace")
        yield from _READERS.get(file.suffix, _of_lines)(text)
    except (OSError, ValueError, AttributeError, TypeError):
        return  # a file that is no list of this form


def _of_lines(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if match := _REQUIREMENT.match(line.strip()):
            yield match["name"], "".join(match["spec"].split())
        elif match := _UNPINNED.match(line):
            yield match["name"], ""


def _of_toml(text: str) -> Iterator[tuple[str, str]]:
    content = tomllib.loads(text)
    project = content.get("project", {})
    optional = project.get("optional-dependencies", {}).values()
    for each in (project.get("dependencies", []), *optional):
        yield from _of_lines("\n".join(each))
    for name, asked in content.get("tool", {}).get("poetry", {}).get("dependencies", {}).items():
        yield name, _of_poetry(asked)


def _of_poetry(asked: Any) -> str:
    """ "^1.2" means at least that, and the same first number that is not 0."""
    spec = asked.get("version", "") if isinstance(asked, dict) else str(asked)
    numbers = _numbers(spec.lstrip("^~="))
    if spec.startswith("^") and numbers:
        kept = next((index for index, number in enumerate(numbers) if number), len(numbers) - 1)
        above = ".".join(str(number) for number in (*numbers[:kept], numbers[kept] + 1))
        return f">={spec[1:]},<{above}"
    return f"=={spec}" if spec[:1].isdigit() else spec


def _of_python(text: str) -> Iterator[tuple[str, str]]:
    """Strings with a version; one without may be anything."""
    for quoted in _QUOTED.finditer(text):
        yield from ((name, version) for name, version in _of_lines(quoted[1]) if version)


def _of_conda(text: str) -> Iterator[tuple[str, str]]:
    for line in text.splitlines():
        if match := _OF_CONDA.match(line):
            yield match["name"], f"=={match['version']}.*"
        else:
            yield from _of_lines(line.strip().removeprefix("- "))


def _of_page(text: str) -> Iterator[tuple[str, str]]:
    """What a page has pip install: words after the command, up to the end of it."""
    for line in text.splitlines():
        if (told := _PIP.match(line)) is None:
            continue
        for match in _REQUIREMENT.finditer(told["words"]):
            yield match["name"], "".join(match["spec"].split())
        if not _BEFORE_PIP.fullmatch(told["before"]):
            continue  # a sentence tells of it: its other words are no packages
        for word in _REQUIREMENT.sub(" ", told["words"]).split():
            if plain := _UNPINNED.fullmatch(word.strip("\"'")):
                yield plain["name"], ""


_READERS: Final = {
    ".toml": _of_toml,
    ".py": _of_python,
    ".yml": _of_conda,
    ".yaml": _of_conda,
    ".md": _of_page,
}
