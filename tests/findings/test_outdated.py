"""Scripts of older libraries, and packages that are missing, in the libraries' own words."""

from __future__ import annotations

import collections
import traceback
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from torch.utils.data import DataLoader

from trainfit.findings.failure import KINDS, of_exception
from trainfit.results.findings import Finding


def fault_of(call: Callable[[], object]) -> Finding | None:
    try:
        call()
    except Exception:
        return of_exception(traceback.format_exc())
    raise AssertionError("it does not fail")


def an_iterator() -> object:
    return iter(DataLoader([1, 2])).next()  # type: ignore[attr-defined, arg-type]


def an_alias() -> object:
    return numpy.float  # type: ignore[attr-defined]


def an_array_of_one() -> object:
    return int(numpy.ones(1))


def a_function() -> object:
    class Old(torch.autograd.Function):
        def forward(self, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return x

    return Old()(torch.ones(1))  # type: ignore[operator]


def a_collection() -> object:
    return collections.Iterable  # type: ignore[attr-defined]


def a_verbose_schedule() -> object:
    weights = torch.optim.SGD([torch.ones(1)])
    return torch.optim.lr_scheduler.StepLR(weights, 1, verbose=True)  # type: ignore[call-arg]


def an_environment() -> object:
    class Environment:
        def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, int]]:
            return action, 0.0, False, False, {}

    state, reward, done, more = Environment().step(1)  # type: ignore[misc]
    return state, reward, done, more


def a_sampler() -> object:
    class Endless(torch.utils.data.Sampler[int]):
        def __init__(self, data: list[int]) -> None:
            super().__init__(data)  # type: ignore[call-arg]

    return Endless([1])


def torch_six() -> object:
    from torch._six import inf  # type: ignore[import-not-found]

    return inf


@pytest.mark.parametrize(
    ("call", "fix"),
    [
        (an_iterator, "next(iterator)"),
        (an_alias, "numpy<1.24"),
        pytest.param(
            an_array_of_one,
            "numpy<2.4",
            marks=pytest.mark.skipif(
                tuple(map(int, numpy.__version__.split(".")[:2])) < (2, 4),
                reason="older versions convert it",
            ),
        ),
        (a_function, "@staticmethod"),
        (a_collection, "collections.abc"),
        (a_verbose_schedule, "leave verbose out"),
        (torch_six, "collections.abc"),
        (lambda: torch._six.inf, "collections.abc"),  # type: ignore[attr-defined]
        (lambda: torch.symeig(torch.eye(2)), "torch.linalg"),  # type: ignore[attr-defined]
        (lambda: torch.stft(torch.rand(64), 16, return_complex=None), "torch.view_as_real"),
        (lambda: torch.istft(torch.rand(9, 5, 2), 16), "torch.view_as_complex"),
        (a_sampler, "super().__init__() without an argument"),
        (an_environment, "terminated or truncated"),
    ],
)
def test_what_libraries_had_once(call: Callable[[], object], fix: str) -> None:
    fault = fault_of(call)
    assert fault is not None and fault.kind == "outdated" and fault.kind in KINDS
    assert fix in fault.fix.action


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        (
            "ImportError: cannot import name '_accumulate' from 'torch._utils' "
            "(/lib/python3.11/site-packages/torch/_utils.py)",
            "from itertools import accumulate",
        ),
        ("AttributeError: 'CIFAR10' object has no attribute 'train_data'", ".data and .targets"),
        (
            "SyntaxError: Missing parentheses in call to 'print'. Did you mean print(...)?",
            "2to3",
        ),
        (
            "TypeError: mel() takes 0 positional arguments but 5 were given",
            "mel(sr=…, n_fft=…",
        ),
        (
            "TypeError: pad_center() takes 1 positional argument but 2 were given",
            "pad_center(window, size=…)",
        ),
        (
            "ImportError: cannot import name 'load_metric' from 'datasets' (/datasets)",
            "pip install evaluate",
        ),
        (
            "TypeError: Bert.__init__() got an unexpected keyword argument 'use_auth_token'",
            "token=…",
        ),
        (
            "TypeError: profile.__init__() got an unexpected keyword argument 'use_cuda'",
            "use_device='cuda'",
        ),
        (
            "AttributeError: 'FigureCanvasAgg' object has no attribute 'tostring_rgb'",
            "buffer_rgba()",
        ),
    ],
)
def test_what_libraries_said_once(said: str, fix: str) -> None:
    frame = '  File "/home/me/layers.py", line 7, in <module>\n    call()\n'
    fault = of_exception(f"Traceback (most recent call last):\n{frame}{said}\n")
    assert fault is not None and fault.kind == "outdated" and fix in fault.fix.action


def test_a_method_of_the_users_own_is_not_librosas() -> None:
    said = "TypeError: Audio.mel() takes 1 positional argument but 2 were given"
    frame = '  File "/home/me/layers.py", line 7, in <module>\n    call()\n'
    fault = of_exception(f"Traceback (most recent call last):\n{frame}{said}\n")
    assert fault is None or fault.kind != "outdated"


def test_a_package_that_asks_for_what_is_gone_is_named() -> None:
    """imgaug 0.4 with NumPy 2: no line of the user's can be changed."""
    packages = "/env/lib/python3.11/site-packages"
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/me/train.py", line 12, in <module>\n    import imgaug\n'
        f'  File "{packages}/imgaug/imgaug.py", line 45, in <module>\n    np.sctypes["float"]\n'
        f'  File "{packages}/numpy/__init__.py", line 778, in __getattr__\n    raise\n'
        "AttributeError: `np.sctypes` was removed in the NumPy 2.0 release. Access dtypes "
        "explicitly instead.\n"
    )
    fault = of_exception(text)
    assert (
        fault is not None and fault.title == "NumPy 2 has this name no longer: imgaug asks for it"
    )
    assert fault.fix.action == (
        "pip install -U imgaug, which may be written for it by now; or pip install 'numpy<2'"
    )


@pytest.mark.parametrize(
    ("module", "title", "fix"),
    [
        ("no_such_package", "no_such_package is not installed", "pip install no_such_package"),
        ("skimage", "skimage is not installed", "pip install scikit-image"),
        ("warpctc_pytorch", "warpctc_pytorch is not installed", "torch.nn.CTCLoss"),
        ("torchtext", "torchtext is not installed, and is made no longer", "collate_fn"),
        ("gdal", "gdal is not installed, and is no module of its own", "from osgeo import gdal"),
        ("beside_the_scripts", "beside_the_scripts lies in this folder", "PYTHONPATH=."),
    ],
)
def test_a_package_that_is_missing(
    module: str, title: str, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_scripts").mkdir()
    (tmp_path / "beside_the_scripts" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    message = f"No module named '{module}'"
    fault = of_exception(f"Traceback (most recent call last):\nModuleNotFoundError: {message}\n")
    assert fault is not None and fault.kind == "package_missing" and fault.kind in KINDS
    assert fault.title.startswith(title) and fix in fault.fix.action


@pytest.mark.parametrize(
    ("builds", "fix"),
    [(True, "pip install -e part, or PYTHONPATH=part"), (False, "PYTHONPATH=part")],
)
def test_a_package_in_a_folder_of_the_scripts_own_code(
    builds: bool, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ACT's detr/models/backbone.py imports util, which lies in detr; pip has another package of
    that name."""
    for folder in ("util", "models"):
        (tmp_path / "part" / folder).mkdir(parents=True)
    for file in ("util/misc.py", "models/backbone.py", *(["setup.py"] if builds else [])):
        (tmp_path / "part" / file).touch()
    monkeypatch.chdir(tmp_path)
    frame = f'  File "{tmp_path}/part/models/backbone.py", line 14, in <module>\n'
    said = "ModuleNotFoundError: No module named 'util'\n"
    fault = of_exception(f"Traceback (most recent call last):\n{frame}{said}")
    assert fault is not None and fault.title.startswith("util lies in part, ")
    assert fault.fix.action == f"{fix} before the command"


@pytest.mark.parametrize(
    ("line", "known"),
    [
        ('assert timm.__version__ == "0.3.2"  # version check', True),
        ("assert len(files) == 3", False),
    ],
)
def test_a_version_that_a_script_insists_on(line: str, known: bool) -> None:
    """MAE wants timm 0.3.2."""
    frame = f'  File "main_pretrain.py", line 27, in <module>\n    {line}\n'
    fault = of_exception(f"Traceback (most recent call last):\n{frame}AssertionError\n")
    assert (fault is not None) is known
    if fault is not None:
        assert fault.title == "The script insists on another version of timm than is installed"


@pytest.mark.parametrize(
    ("said", "gone"),
    [
        ("ModuleNotFoundError: No module named 'numpy.gone'", "numpy has no numpy.gone"),
        (
            "ImportError: cannot import name 'gone' from 'timm.optim' (/e/site-packages/timm/a.py)",
            "timm has no timm.optim.gone",
        ),
        ("ImportError: cannot import name 'gone' from 'models' (/home/me/models.py)", None),
    ],
)
def test_what_the_installed_version_of_a_package_has_not(said: str, gone: str | None) -> None:
    """ConvNeXt imports timm.optim.novograd of timm 0.3."""
    fault = of_exception(f"Traceback (most recent call last):\n{said}\n")
    assert fault is None if gone is None else fault is not None
    if fault is not None:
        assert fault.title == f"The installed version of {gone}"
        assert "requirements" in fault.fix.action


@pytest.mark.parametrize(
    ("imports", "call", "said", "title"),
    [
        (
            "import timm",
            "timm.create_model('vit', extra=1)",
            "create_model() got an unexpected keyword argument 'extra'",
            "create_model() of the installed timm",
        ),
        (
            "from torch.utils.data import DataLoader",
            "DataLoader([], extra=1)",
            "DataLoader.__init__() got an unexpected keyword argument 'extra'",
            "DataLoader() of the installed torch",
        ),
        ("from model import Net", "Net(extra=1)", "Net.__init__() got an unexpected keyword", None),
        (
            "import torch",
            "Net(extra=1)",
            "Net.__init__() got an unexpected keyword argument 'a'",
            None,
        ),
    ],
)
def test_an_argument_that_the_installed_version_has_not(
    tmp_path: Path, imports: str, call: str, said: str, title: str | None
) -> None:
    script = tmp_path / "train.py"
    script.write_text(f"{imports}\n{call}\n")
    text = f'  File "{script}", line 2, in <module>\n    {call}\nTypeError: {said}\n'
    fault = of_exception(f"Traceback (most recent call last):\n{text}")
    assert (fault.title if fault is not None else None) == title or (
        fault is not None and title is not None and fault.title.startswith(title)
    )


def test_an_argument_that_a_package_hands_on(tmp_path: Path) -> None:
    """What the user's call gives is refused deep in the package; not what it did not give."""
    script = tmp_path / "train.py"
    script.write_text("import timm\nmodel = timm.create_model(\n    'vit',\n    extra=1,\n)\n")
    inner = '  File "/lib/site-packages/timm/vit.py", line 9, in vit\n    return Vit(**kwargs)\n'
    said = "TypeError: Vit.__init__() got an unexpected keyword argument '{}'\n"
    text = f'  File "{script}", line 2, in <module>\n    model = timm.create_model(\n{inner}{said}'
    fault = of_exception(f"Traceback (most recent call last):\n{text.format('extra')}")
    assert fault is not None and fault.title.startswith("timm.create_model() of the installed timm")
    assert of_exception(f"Traceback (most recent call last):\n{text.format('other')}") is None


def test_a_module_of_the_scripts_own_package_is_no_package() -> None:
    text = (
        "Traceback (most recent call last):\nModuleNotFoundError: No module named 'models.gone'\n"
    )
    assert of_exception(text) is None


def test_a_model_that_diffusers_cannot_download() -> None:
    """DiT loads its autoencoder by name; without a network diffusers says that there is no file."""
    said = "OSError: stabilityai/sd-vae-ft-ema does not appear to have a file named config.json."
    fault = of_exception(f"Traceback (most recent call last):\n{said}\n")
    assert fault is not None and fault.kind == "hub_unreachable" and fault.kind in KINDS
    assert "hf download" in fault.fix.action
