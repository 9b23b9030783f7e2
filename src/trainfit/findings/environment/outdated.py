"""A script that was written for other versions of libraries than are installed.

Repositories of papers name the versions that they were written for, and run with newer ones. Each
name here is one that a library had and has no longer, with what took its place.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from typing import Final

from trainfit.findings.environment.requirements import Unmet, installed_version, unmet, unmet_by
from trainfit.findings.facts import FailureContext
from trainfit.findings.source_code import file_syntax
from trainfit.findings.tracebacks import NO_MODULE, Frame, ParsedException, modules_named
from trainfit.findings.training_errors import KnownError, first_met
from trainfit.results.findings import Finding, failure_finding

#: Modules that an installed package no longer has: what took their place.
_MOVED: Final = {
    "torchvision.models.utils": "torch.hub.load_state_dict_from_url",
    "torch.utils.serialization": "t7 files: torch.save of a newer Torch, or the package torchfile",
    "torchtext.legacy": "a plain Dataset and collate_fn; torchtext 0.11 was the last with it",
    "pytorch_lightning.metrics": "the package torchmetrics",
    "sklearn.externals": "import joblib",
    "tensorflow.contrib": "what stands in tensorflow.keras, or tensorflow 1",
    "keras.utils.np_utils": "keras.utils.to_categorical",
    "distutils": "pip install setuptools, which has it still",
    "imp": "importlib",
}
_KNOWN: Final = (
    # torch 2.0
    KnownError(
        "outdated",
        re.compile(r"No module named 'torch\._six'|module 'torch' has no attribute '_six'"),
        "PyTorch 2 and newer have no copy of six any longer",
        "str, int and math.inf for string_classes, int_classes and inf; collections.abc for "
        "container_abcs",
    ),
    # torch/utils/data/dataloader.py: _BaseDataLoaderIter has __next__ alone
    KnownError(
        "outdated",
        re.compile(r"object has no attribute 'next'"),
        "An iterator's next() is gone since Python 3 and PyTorch 1.13",
        "next(iterator) instead of iterator.next()",
    ),
    # numpy/__init__.py: __former_attrs__, __expired_attributes__
    KnownError(
        "outdated",
        re.compile(
            r"module 'numpy' has no attribute '(?:int|float|bool|object|complex|str|long|unicode)'"
        ),
        "NumPy 1.24 and newer have no aliases of Python's types",
        "int, float, bool, object instead of np.int, np.float, np.bool, np.object; or pip install "
        "'numpy<1.24' (on a Python that it is built for)",
    ),
    KnownError(
        "outdated",
        re.compile(r"was removed in the NumPy 2\.0 release|np\.\w+ is removed in NumPy 2"),
        "NumPy 2 has this name no longer",
        "the name that the message gives, or pip install 'numpy<2'",
    ),
    # numpy/_core/src/multiarray/common.c, of NumPy 2.4
    KnownError(
        "outdated",
        re.compile(r"only 0-dimensional arrays can be converted to Python scalars"),
        "NumPy 2.4 and newer make no number of an array of one element",
        "int(a[0]) or a.item() instead of int(a), or pip install 'numpy<2.4'",
    ),
    # torch/_utils.py up to 2.2: torch.utils.data.random_split used it
    KnownError(
        "outdated",
        re.compile(r"cannot import name '_accumulate' from 'torch\._utils'"),
        "PyTorch has no copy of itertools.accumulate any longer",
        "from itertools import accumulate as _accumulate",
    ),
    # torch/functional.py and torch/_linalg_utils.py: torch.qr, torch.symeig, torch.lstsq, …
    KnownError(
        "outdated",
        re.compile(r"This function was deprecated since version [\d.]+ and is now removed"),
        "PyTorch has this function no longer",
        "the one of torch.linalg that the message names (torch.linalg.qr for torch.qr, "
        "torch.linalg.eigh for torch.symeig)",
    ),
    # torchvision/datasets/cifar.py and others, up to 0.2
    KnownError(
        "outdated",
        re.compile(
            r"'(?:CIFAR100?|MNIST|FashionMNIST|SVHN|STL10)' object has no attribute "
            r"'(?:train|test)_(?:data|labels)'"
        ),
        "torchvision's data sets have data and targets since 0.3",
        ".data and .targets instead of .train_data, .test_data, .train_labels and .test_labels",
    ),
    # Parser/pegen_errors.c
    KnownError(
        "outdated",
        re.compile(r"Missing parentheses in call to '(?:print|exec)'"),
        "The file is written for Python 2",
        "print(…) with parentheses; 2to3 changes that and what else differs (python3.12 -m "
        "lib2to3 -w FILE, or the package fissix)",
    ),
    # librosa/filters.py, util/utils.py, core/audio.py, effects.py of 0.10
    KnownError(
        "outdated",
        re.compile(
            r"(?<![\w.])(?:mel|pad_center|fix_length|resample|melspectrogram|mfcc|stft|istft"
            r"|time_stretch|pitch_shift)\(\) \w+ [01] positional arguments? but \d"
        ),
        "librosa 0.10 and newer are given these by name only",
        "mel(sr=…, n_fft=…, n_mels=…, fmin=…, fmax=…), pad_center(window, size=…), "
        "resample(y, orig_sr=…, target_sr=…)",
    ),
    # matplotlib/backends/backend_agg.py of 3.10
    KnownError(
        "outdated",
        re.compile(r"object has no attribute 'tostring_rgb'"),
        "Matplotlib 3.10 and newer have no tostring_rgb() any longer",
        "numpy.asarray(figure.canvas.buffer_rgba())[..., :3] in its place, which has the "
        "figure's shape already",
    ),
    # torch/csrc/autograd/python_function.cpp
    KnownError(
        "outdated",
        re.compile(r"Legacy autograd function with non-static forward method is deprecated"),
        "A torch.autograd.Function with state of its own is no longer called",
        "@staticmethod forward(ctx, …) and backward(ctx, …), called as Name.apply(…)",
    ),
    # PIL/Image.py of Pillow 10
    KnownError(
        "outdated",
        re.compile(r"module 'PIL\.Image' has no attribute '(?:ANTIALIAS|LINEAR|CUBIC)'"),
        "Pillow 10 and newer have other names of their filters",
        "Image.LANCZOS, Image.BILINEAR, Image.BICUBIC instead of ANTIALIAS, LINEAR, CUBIC",
    ),
    KnownError(
        "outdated",
        re.compile(r"'(?:FreeTypeFont|ImageDraw)' object has no attribute '(?:getsize|textsize)'"),
        "Pillow 10 and newer measure texts otherwise",
        "font.getbbox(text)[2:] instead of getsize, draw.textbbox((0, 0), text) for textsize",
    ),
    # collections/__init__.py of Python 3.10
    KnownError(
        "outdated",
        re.compile(
            r"module 'collections' has no attribute '(?:Iterable|Mapping|Sequence|Callable)'"
            r"|cannot import name '(?:Iterable|Mapping|Sequence|Callable)' from 'collections'"
        ),
        "Python 3.10 and newer have it in collections.abc",
        "from collections.abc import …",
    ),
    # transformers/optimization.py up to 4.5x
    KnownError(
        "outdated",
        re.compile(r"cannot import name 'AdamW' from 'transformers"),
        "transformers has no AdamW of its own any longer",
        "from torch.optim import AdamW",
    ),
    # torch/optim/lr_scheduler.py
    KnownError(
        "outdated",
        re.compile(
            r"(?:LR|LROnPlateau)\.__init__\(\) got an unexpected keyword argument 'verbose'"
        ),
        "PyTorch's schedules have no verbose any longer",
        "leave verbose out, and print scheduler.get_last_lr()",
    ),
    # datasets/load.py, up to 2
    KnownError(
        "outdated",
        re.compile(r"cannot import name 'load_metric' from 'datasets'"),
        "datasets has no metrics any longer",
        "pip install evaluate; from evaluate import load as load_metric",
    ),
    # transformers/modeling_utils.py, datasets/load.py: use_auth_token, up to 4
    KnownError(
        "outdated",
        re.compile(r"got an unexpected keyword argument 'use_auth_token'"),
        "transformers and datasets have no use_auth_token any longer",
        "token=… instead of use_auth_token=…",
    ),
    # aten/src/ATen/native/SpectralOps.cpp, since 2.0
    KnownError(
        "outdated",
        re.compile(r"stft requires the return_complex parameter be given"),
        "PyTorch 2 and newer have torch.stft return complex numbers",
        "torch.view_as_real(torch.stft(…, return_complex=True)) for the two planes of before; or "
        "return_complex=True and .abs() for the magnitudes",
    ),
    # the same file, of torch.istft
    KnownError(
        "outdated",
        re.compile(r"istft requires a complex-valued input tensor"),
        "PyTorch 2 and newer give torch.istft complex numbers alone",
        "torch.istft(torch.view_as_complex(x.contiguous()), …)",
    ),
    # torch/autograd/profiler.py, up to 2.13
    KnownError(
        "outdated",
        re.compile(r"profile\.__init__\(\) got an unexpected keyword argument 'use_cuda'"),
        "PyTorch's profiler has no use_cuda any longer",
        "use_device='cuda' instead of use_cuda=True",
    ),
    # scipy.misc, up to 1.2
    KnownError(
        "outdated",
        re.compile(r"'scipy\.misc'|module 'scipy' has no attribute 'misc'"),
        "SciPy reads and resizes no images any longer",
        "imageio.imread and PIL's Image.resize instead of scipy.misc",
    ),
)


def outdated(raised: ParsedException, _: FailureContext) -> Finding | None:
    """What an import that fails, or a name that a library had once, means."""
    if met := first_met(_KNOWN, raised.message):
        if (package := _asking_package(raised)) is not None:
            older = _OLDER.search(met[0].fix)
            fix = f"pip install -U {package}, which may be written for it by now"
            fix += f"; or {older[0]}" if older is not None else ""
            return failure_finding("outdated", f"{met[0].title}: {package} asks for it", "", fix)
        return failure_finding("outdated", met[0].title, "", met[0].fix)
    if raised.type == "AssertionError" and (asked := _asked_version(raised)):
        return failure_finding(
            "outdated",
            f"The script insists on another version of {asked} than is installed",
            "",
            "the version that the line names, in an environment of its own; or remove the line, "
            "and change what has another name in the installed one",
        )
    if _STEP_OF_FIVE.search(raised.message) and _calls(raised, "step"):
        return failure_finding(
            "outdated",
            "An environment's step() gives five values since gym 0.26 (gymnasium)",
            "",
            "observation, reward, terminated, truncated, info = env.step(action); done = "
            "terminated or truncated; and reset() gives observation, info",
        )
    if raised.type == "KeyError" and raised.message.strip("'\"") in _OF_LAST_STEP:
        return failure_finding(
            "outdated",
            "gymnasium 1.0 has other names for the last observation of an episode: final_obs",
            "",
            'infos["final_obs"] and infos["_final_obs"] of environments that are made with '
            "autoreset_mode=gymnasium.vector.AutoresetMode.SAME_STEP, final_info likewise (without "
            'it none comes: the next step resets); the return is in infos["episode"] of '
            'RecordEpisodeStatistics; or pip install "gymnasium<1"',
        )
    if raised.message.startswith("object.__init__() ") and _is_of_class(raised, "Sampler"):
        return failure_finding(
            "outdated",
            "PyTorch's Sampler has no argument data_source any longer",
            "",
            "super().__init__() without an argument, in the sampler's own __init__",
        )
    lacks = _NAME_GONE.search(raised.message)
    if lacks is not None and "circular import" not in raised.message:
        return _other_version(lacks[2].partition(".")[0], f"{lacks[2]}.{lacks[1]}", raised)
    missing = NO_MODULE.search(raised.message)
    if raised.type != "ModuleNotFoundError" or missing is None:
        return None
    module = missing[1]
    for moved, instead in _MOVED.items():
        if module == moved or module.startswith(f"{moved}."):
            title = f"The installed version has no module {moved} any longer"
            return failure_finding("outdated", title, "", f"instead: {instead}")
    name = module.partition(".")[0]
    is_part = module != name and _is_installed(name)
    return _other_version(name, module, raised) if is_part else None


#: A name that is gone: who asks for it is to be changed, whoever called that.
_GONE: Final = re.compile(r"has no attribute|cannot import name|(?:was|is) removed|No module named")
_OLDER: Final = re.compile(r"pip install '[^']+'")


_LACKING: Final = re.compile(r"module '(\w+)[\w.]*' has no attribute")


def _asking_package(raised: ParsedException) -> str | None:
    """The installed package whose line asks for a name that is gone; ``None``: the user's does."""
    # NumPy and PyTorch tell of what they lack in a function of their own.
    lacking = _LACKING.search(raised.message)
    telling = ("numpy", lacking and lacking[1])
    asking = [frame for frame in raised.frames if frame.package not in telling]
    is_gone = bool(asking) and _GONE.search(raised.message) is not None
    return asking[-1].package or None if is_gone else None


#: What vectorized environments told of an episode's end until gymnasium 1.0.
_OF_LAST_STEP: Final = ("final_observation", "_final_observation", "final_info", "_final_info")
#: gym/core.py and gymnasium/core.py: observation, reward, terminated, truncated, info.
_STEP_OF_FIVE: Final = re.compile(r"too many values to unpack \(expected 4(?:, got 5)?\)")


def _calls(raised: ParsedException, method: str) -> bool:
    """Does the user's line call a method of this name?"""
    return re.search(rf"\.{method}\s*\(", raised.code) is not None


def _is_of_class(raised: ParsedException, base: str) -> bool:
    """Does the user's line stand in a class whose base is called so?"""
    heads = (line for line in reversed(raised.lines) if re.match(r"\s*class\b", line))
    return re.search(rf"\(.*\b{base}\b", next(heads, "")) is not None


#: Of an installed package: Python says in which file it looked.
_NAME_GONE: Final = re.compile(
    r"cannot import name '(\w+)' from '([\w.]+)' \([^()\n]*(?:site|dist)-packages"
)


def _other_version(package: str, gone: str, raised: ParsedException) -> Finding:
    """The finding on a package that is installed, without a name or a module that the script
    imports."""
    if compared := _compared_as_number(raised, package):
        return compared
    if asked := unmet([package], raised.folder):
        return _excluded(asked, f": it has no {gone}")
    if asked := _unmet_by_importer(package, raised):
        return _excluded(asked, f": it has no {gone}", "`pip check` names what else disagrees")
    return failure_finding(
        "outdated",
        f"The installed version of {package} has no {gone}",
        "",
        f"the version of {package} that the script was written for (its README or requirements "
        "name it), in an environment of its own; or the name's place in the installed one",
    )


def _unmet_by_importer(package: str, raised: ParsedException) -> Unmet | None:
    """What the package whose module imports from ``package`` asks for of it."""
    importers = [frame.package for frame in raised.frames if frame.package not in ("", package)]
    return unmet_by(importers[-1], package) if importers else None


def _excluded(asked: Unmet, why: str = "", other: str = "") -> Finding:
    other = other or "or change the line to what the installed version has"
    text = f"{asked.package}{asked.version}"
    return failure_finding(
        "outdated",
        f"{asked.file} asks for {text}, and {asked.installed} is installed{why}",
        "",
        f"pip install '{text}', in an environment of its own; {other}",
    )


#: A call that does not fit the signature of what is called (Python/ceval.c, Objects/call.c).
_SIGNATURE: Final = re.compile(
    r"(?:(\w+)\.)?(\w+)\(\) (?:got an unexpected keyword argument|got multiple values for"
    r"|missing \d+ required|[a-z]+ (?:no|from|at most|exactly|\d+)\b[\w ]*\barguments?\b)"
)
_OF_MODULE: Final = re.compile(r"module '([\w]+)[\w.]*' has no attribute")


def excluded(raised: ParsedException, _: FailureContext) -> Finding | None:
    """What fails as a changed library does, at a package whose installed version the repository's
    requirements exclude: another signature, or a name that is gone."""
    packages = _changed(raised)
    asked = unmet(packages, raised.folder) if packages else None
    return None if asked is None else _excluded(asked)


#: "profile.__init__() got an unexpected keyword argument 'use_cuda'".
_ARGUMENT: Final = re.compile(r"((?:\w+\.)?\w+)\(\) got an unexpected keyword argument '(\w+)'")


def argument_gone(raised: ParsedException, _: FailureContext) -> Finding | None:
    """A call of the user's with an argument that what it calls, of an installed package, does not
    have: whatever versions the repository asks for."""
    met = _ARGUMENT.search(raised.message)
    if raised.type != "TypeError" or met is None or raised.culprit is None:
        return None
    owner, _dot, name = met[1].rpartition(".")
    called = owner if name == "__init__" else name
    if not raised.frames[-1].is_user:
        called = _called_with(raised.culprit, met[2])
    package = next((each for each in _imported_as(raised, called) if _is_installed(each)), "")
    if not (called and package):
        return None
    version = installed_version(package)
    return failure_finding(
        "outdated",
        f"{called}() of the installed {f'{package} {version}'.strip()} has no argument {met[2]}",
        "",
        f"leave {met[2]} out, or write what the installed version has in its place; or the version "
        f"of {package} that the script was written for, in an environment of its own",
    )


def _changed(raised: ParsedException) -> list[str]:
    """The packages that may have changed: those in which it is raised, the innermost first, or
    the one whose function the user's line calls; none where it may be the user's own name."""
    inner: list[str] = []
    for frame in reversed(raised.frames):
        if frame.is_user:
            break
        inner.append(frame.package)
    inner = [each for each in inner if each not in ("", "torch")]
    if raised.type == "TypeError":
        signature = _SIGNATURE.search(raised.message)
        if signature is None or inner:
            return inner if signature is not None else []
        owner, name = signature[1] or "", signature[2]
        if owner and (found := _imported_as(raised, owner)):
            return found
        return _imported_as(raised, name) if name != "__init__" else []
    if raised.type == "AttributeError":
        named = _OF_MODULE.search(raised.message)
        return [named[1]] if named is not None else inner
    return inner if raised.type in ("ImportError", "ModuleNotFoundError") else []


def _imported_as(raised: ParsedException, name: str) -> list[str]:
    """The module that a class or function of this name is from, by the imports of the user's file
    or as the user's line calls it; none: it is no module's."""
    culprit = raised.culprit
    if culprit is None:
        return []
    called = re.search(rf"(?<![\w.])([A-Za-z_]\w*)\.(?:\w+\.)*{name}\s*\(", culprit.code)
    root = called[1] if called is not None else name
    return modules_named(dataclasses.replace(culprit, code=root))


def _called_with(frame: Frame, argument: str) -> str:
    """What the user's statement calls with an argument of this name, with its dots; or empty."""
    tree = file_syntax(frame.path)
    nodes = () if tree is None else ast.walk(tree)
    calls = [node for node in nodes if isinstance(node, ast.Call)]
    at = [call for call in calls if call.lineno <= frame.line <= (call.end_lineno or 0)]
    given = [call for call in at if any(word.arg == argument for word in call.keywords)]
    return ast.unparse(given[-1].func) if given else ""


#: Lines above one that fails that may be the condition it stands under.
_BEFORE: Final = 6
#: "if float(torchvision.__version__[:3]) < 0.7:"
_AS_NUMBER: Final = re.compile(r"float\(\s*(\w+)\.__version__\[:\s*(\d)\s*\]\s*\)\s*<=?\s*[\d.]+")


def _compared_as_number(raised: ParsedException, package: str) -> Finding | None:
    """A version that the script takes for a number: 0.20 is then before 0.7."""
    for line in reversed(raised.lines[-_BEFORE:]):
        match = _AS_NUMBER.search(line)
        if match is None or match[1] != package:
            continue
        version = installed_version(package)
        return failure_finding(
            "outdated",
            f"`{match[0]}` compares {version[: int(match[2])]}, and {package} is {version}",
            "",
            f"compare numbers: tuple(int(n) for n in {package}.__version__.split('.')[:2]) with "
            "(0, 7) for 0.7; here, remove the branch for old versions",
        )
    return None


def _is_installed(package: str) -> bool:
    """Is it an installed package's, and not a folder of the user's code?"""
    try:
        spec = importlib.util.find_spec(package)
    except ValueError:  # a module that was made without a spec, as __main__ may be
        return False
    return spec is not None and "-packages" in (spec.origin or "")


_VERSION_ASKED: Final = re.compile(r"^assert\b.*?\b([A-Za-z_]\w*)\.__version__")


def _asked_version(raised: ParsedException) -> str:
    """The package of whose version the line that raised makes sure; empty: of none."""
    match = _VERSION_ASKED.search(raised.code.strip())
    return match[1] if match is not None else ""
