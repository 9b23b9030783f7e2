"""Packages that are missing: what is offered for each, by what the repository says of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainfit.findings.failure import KINDS, of_exception
from trainfit.results.findings import Finding


def absent(module: str, folder: Path) -> Finding:
    said = f"ModuleNotFoundError: No module named '{module}'"
    frames = f'  File "{folder / "train.py"}", line 1, in <module>\n    import {module}\n'
    fault = of_exception(f"Traceback (most recent call last):\n{frames}{said}\n")
    assert fault is not None and fault.kind == "package_missing" and fault.kind in KINDS
    return fault


@pytest.mark.parametrize(
    ("module", "fix"),
    [
        ("hydra", "pip install hydra-core"),
        ("ignite", "pip install pytorch-ignite"),
        ("clip", "pip install git+https://github.com/openai/CLIP.git"),
        ("gym", "gymnasium in its place"),
        ("tensorflow", "pip install 'tensorflow>=1.8,<2' (setup.py names it;"),
        ("addict_x", "pip install addict_x (requirements.txt names it)"),
        ("patoolib", "pip install 'patool==4.0.3' (requirements.txt names it"),
        ("skimage", "pip install scikit-image (requirements.txt names it)"),
        ("chess_x", "pip install 'python-chess-x>=1' (requirements.txt names it"),
        ("optimum.gptq", "pip install optimum"),
        ("optimum.quanto", "pip install optimum-quanto"),
        ("google.cloud.storage", "pip install google-cloud-storage"),
        ("utilities", "no list of requirements here names it"),
    ],
)
def test_pip_is_told_what_is_meant(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, fix: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.py").write_text("setup(install_requires=['tensorflow>=1.8,<2', 'tqdm'])\n")
    (tmp_path / "requirements.txt").write_text(
        "patool==4.0.3\npython-chess-x>=1\nscikit-image\naddict_x  # of the configuration\n"
    )
    assert fix in absent(module, tmp_path).fix.action


@pytest.mark.parametrize(
    ("module", "setup", "text"),
    [
        ("lib.version", "setup.py", "VERSION = 'lib/version.py'\n"),
        ("MultiScaleOps", "models/ops/setup.py", "ext = CUDAExtension(\n  'MultiScaleOps', [])\n"),
        ("lib.ops.nms_ext", "setup.py", "CppExtension(name='lib.ops.nms_ext', sources=[])\n"),
    ],
)
def test_what_a_setup_builds_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, setup: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / setup
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    fault = absent(module, tmp_path)
    assert fault.title == f"{module} is made when its package is installed, by {setup}"
    where = setup.rpartition("/")[0] or "."
    assert fault.fix.action == f"pip install --no-build-isolation -e {where}"


def test_the_repository_around_the_folder_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """robomimic is run from robomimic/scripts, two folders below its setup.py."""
    (tmp_path / "setup.py").write_text("setup(name='lib')\n")
    scripts = tmp_path / "lib" / "scripts"
    scripts.mkdir(parents=True)
    (tmp_path / "lib" / "__init__.py").touch()
    monkeypatch.chdir(scripts)
    fault = absent("lib", scripts)
    assert fault.title == "lib lies in ../.., where Python does not look"
    assert fault.fix.action == "pip install -e ../.., or PYTHONPATH=../.. before the command"


@pytest.mark.parametrize(
    "said",
    [
        "ModuleNotFoundError: No module named 'tacotron2.layers'",
        "ModuleNotFoundError: No module named 'tacotron2'",
        "ImportError: cannot import name 'layers' from 'tacotron2' (unknown location)",
    ],
)
def test_a_submodule_that_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    """waveglow has tacotron2 as a submodule: a plain clone and a downloaded archive have an empty
    folder in its place."""
    monkeypatch.chdir(tmp_path)
    frames = f'  File "{tmp_path / "train.py"}", line 1, in <module>\n    import tacotron2\n'
    text = f"Traceback (most recent call last):\n{frames}{said}\n"
    url = "http://github.com/NVIDIA/tacotron2"
    (tmp_path / ".gitmodules").write_text(
        f'[submodule "taco"]\n\tpath = lib/tacotron2\n\turl = {url}\n[submodule "b"]\n\tpath = b\n'
    )
    (tmp_path / "lib" / "tacotron2").mkdir(parents=True)
    fault = of_exception(text)
    assert fault is not None
    assert fault.title == "lib/tacotron2 is a git submodule that was not checked out"
    assert fault.fix.action == f"git clone --recursive {url} lib/tacotron2"
    (tmp_path / ".git").mkdir()
    fault = of_exception(text)
    assert fault is not None
    assert fault.fix.action == "git submodule update --init --recursive lib/tacotron2"
    (tmp_path / "lib" / "tacotron2" / "layers.py").touch()
    fault = of_exception(text)
    assert fault is None or "submodule" not in fault.title


def test_what_a_script_next_to_it_compiles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CenterNet's DCNv2: from ._ext import dcn_v2, which make.sh builds."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "lib" / "DCNv2"
    folder.mkdir(parents=True)
    assert of_exception(_of_ext(folder)) is None
    (folder / "make.sh").touch()
    fault = of_exception(_of_ext(folder))
    assert fault is not None and fault.kind == "package_missing"
    assert fault.title == "lib.DCNv2._ext is compiled by lib/DCNv2/make.sh, which has not been run"
    assert fault.fix.action.startswith("cd lib/DCNv2 && sh make.sh;")
    (folder / "_ext").mkdir()
    assert of_exception(_of_ext(folder)) is None


def _of_ext(folder: Path) -> str:
    frame = f'  File "{folder / "func.py"}", line 9, in <module>\n    from ._ext import dcn_v2\n'
    said = "ModuleNotFoundError: No module named 'lib.DCNv2._ext'"
    return f"Traceback (most recent call last):\n{frame}{said}\n"


@pytest.mark.parametrize("chained", [True, False])
def test_a_library_that_imports_a_class_by_its_name(tmp_path: Path, chained: bool) -> None:
    """Hydra's ImportError of diffusion_policy, whose requirements name another Hydra."""
    (tmp_path / "requirements.txt").write_text("hydra-core==1.0\nzarr\n")
    user = f'  File "{tmp_path / "train.py"}", line 30, in main\n    get_class(target)\n'
    library = '  File "/lib/site-packages/hydra/utils.py", line 44, in get_class\n    raise e\n'
    heading = "Traceback (most recent call last):\n"
    text = f"{heading}{user}{library}ImportError: Error loading 'policy.Workspace':"
    absent = "ModuleNotFoundError: No module named 'zarr'\n"
    if chained:
        joint = "\nThe above exception was the direct cause of the following exception:\n\n"
        text = f"{heading}{user}{absent}{joint}{text}\nAre you sure?\n"
    else:
        said = """ModuleNotFoundError("No module named 'zarr'")"""
        text += f"\n{said}\nAre you sure that 'Workspace' is importable?\n"
    fault = of_exception(text)
    assert fault is not None and fault.kind == "package_missing"
    assert fault.fix.action.startswith("pip install zarr")


@pytest.mark.parametrize(
    ("said", "fix"),
    [
        (  # accelerate/state.py
            "ImportError: DeepSpeed is not available => install it using `pip3 install deepspeed` "
            "or build it from source",
            "pip install deepspeed,",
        ),
        (  # transformers/integrations/integration_utils.py
            "RuntimeError: WandbCallback requires wandb to be installed. Run `pip install wandb`.",
            "pip install wandb,",
        ),
        (
            "ValueError: requires the kernels package: `pip install kernels>=0.12.0`",
            "pip install 'kernels>=0.12.0',",
        ),
        (
            "ImportError: Deepspeed TP requires deepspeed >= 0.16.4, Please update DeepSpeed via "
            "`pip install deepspeed -U`.",
            "pip install -U deepspeed,",
        ),
        (  # a line that the message breaks
            "ImportError: \nT5Tokenizer requires the SentencePiece library. You can install it "
            "with pip: `pip install\nsentencepiece`. Please note that you may need to restart",
            "pip install sentencepiece,",
        ),
        (
            "ImportError: vLLM is not installed. Please install it with `pip install trl[vllm]`.",
            "pip install 'trl[vllm]',",
        ),
        (
            "importlib.metadata.PackageNotFoundError: No package metadata was found for optimum",
            "pip install optimum",
        ),
    ],
)
def test_what_a_library_asks_for_by_itself(said: str, fix: str) -> None:
    frames = '  File "/usr/lib/python3/site-packages/lib/a.py", line 1, in <module>\n    raise\n'
    fault = of_exception(f"Traceback (most recent call last):\n{frames}{said}\n")
    assert fault is not None and fault.kind == "package_missing"
    assert fault.fix.action.startswith(fix)


def test_pip_in_another_message_is_no_missing_package() -> None:
    said = "ValueError: loss is nan; see the page of `pip install thing` for its history"
    frames = '  File "train.py", line 1, in <module>\n    raise\n'
    assert of_exception(f"Traceback (most recent call last):\n{frames}{said}\n") is None


@pytest.mark.parametrize(
    ("module", "asked", "fix"),
    [
        ("slayer_x", "slayer-x (>=0.4.0)", "pip install 'slayer-x>=0.4.0' (asking 1.5 names it"),
        ("FrEIA_x", "freia-x", "pip install freia-x (asking 1.5 names it)"),
        ("mcli_x", "mosaicml-x-cli; rich", "pip install mosaicml-x-cli (asking 1.5 names it)"),
        ("mcli_x", "mosaicml-x-cli; other-x", "no list of requirements here names it"),
        ("mcli_x", "yarl-x; mcli-x-core", "pip install mcli-x-core (asking 1.5 names it)"),
    ],
)
def test_what_an_installed_package_imports_it_asks_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: str, asked: str, fix: str
) -> None:
    site = tmp_path / "lib" / "python3" / "site-packages"
    told = site / "asking-1.5.dist-info" / "METADATA"
    told.parent.mkdir(parents=True)
    wants = "".join(f"Requires-Dist: {each.strip()}\n" for each in asked.split(";"))
    told.write_text(f"Metadata-Version: 2.1\nName: asking\nVersion: 1.5\n{wants}")
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.chdir(tmp_path)
    frames = "".join(
        f'  File "{file}", line 1, in <module>\n    import {name}\n'
        for file, name in ((tmp_path / "train.py", "asking"), (site / "asking/a.py", module))
    )
    said = f"ModuleNotFoundError: No module named '{module}'"
    fault = of_exception(f"Traceback (most recent call last):\n{frames}{said}\n")
    assert fault is not None and fix in fault.fix.action
