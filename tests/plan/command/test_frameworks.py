"""Arguments that a plan tells users of training libraries to change."""

from __future__ import annotations

import importlib
import inspect
import re

import pytest

from helpers_cases import slow_but
from trainfit.plan.command.tunables import FRAMEWORKS
from trainfit.results.runs.steps import Framework

MODULES = {"Transformers": "transformers", "Lightning": "lightning", "Accelerate": "accelerate"}


@pytest.mark.parametrize("name", slow_but(MODULES, "Transformers", "Accelerate"))
def test_the_libraries_have_these_arguments(name: Framework) -> None:
    try:
        module = importlib.import_module(MODULES[name])
    except (ImportError, RuntimeError) as error:  # a torchvision that is for another PyTorch
        pytest.skip(f"{MODULES[name]} cannot be imported here: {error}")
    framework = FRAMEWORKS[name]
    known = set(inspect.signature(getattr(module, framework.call)).parameters)
    assert set(framework.names.values()) <= known
    for written in framework.precision.values():
        assert set(re.findall(r"(\w+)=", written)) <= known


def test_each_framework_sets_precision_and_accumulation() -> None:
    for framework in FRAMEWORKS.values():
        assert set(framework.precision) == {"bfloat16", "float16", "off"}
        assert framework.with_accumulation == f"{framework.call}({framework.names['grad_accum']}=…)"
