"""``torch.compile`` and what comes with it; imported when it is first asked for."""

from __future__ import annotations

import importlib
import sys
import typing
from collections.abc import Callable
from types import ModuleType
from typing import Any, Final

from trainfit.torch_private.needed import needed

#: Its modules, for whoever waits for their import.
TRACE_RULES: Final = "torch._dynamo.trace_rules"
_FRAMES: Final = "torch._dynamo.eval_frame"
_CALLBACK: Final = "torch._dynamo.callback"
_REMOTE_MODULES: Final = "torch.distributed.nn.jit.instantiator"
#: What PyTorch "compiles", with a backend that runs eagerly, for FlexAttention outside of a
#: compiled callable.
EAGER_FLEX: Final = "_flex_attention_hop_wrapper"


def import_compiler() -> None:
    """Every optimizer imports ``torch._dynamo``."""
    importlib.import_module("torch._dynamo")


def class_of_compiled() -> type | None:
    """The class of what ``torch.compile`` gives for a module; ``None``: nobody can have asked for
    it yet."""
    kind: type | None = getattr(sys.modules.get(_FRAMES), "OptimizedModule", None)
    return kind


def remove_import_folder() -> None:
    """Remove the temporary folder that PyTorch 2.8 makes when the compiler is imported.

    It is for the code of RemoteModules. A process that ends without Python's exit would leave it,
    and the children of a process would each remove its folder.
    """
    folder = getattr(sys.modules.get(_REMOTE_MODULES), "_TEMP_DIR", None)
    if folder is not None:
        folder.cleanup()


def on_compilation(callback: Callable[[Any], None]) -> bool:
    """Call ``callback`` whenever a compilation starts; ``False``: the compiler is not in use."""
    module = sys.modules.get(_CALLBACK)
    if module is None:
        return False
    with needed():
        module.on_compile_start(callback)
    return True


def traces_original(replacement: Any, original: Any) -> None:
    """Let ``torch.compile`` trace ``original`` where it meets ``replacement``."""
    replacement._torchdynamo_inline = original


def flex_attention() -> ModuleType:
    """FlexAttention's module, whose name in its package is the operator's.

    Raises:
        MissingNameError: A name of it that is needed is not there.
    """
    with needed():
        module = importlib.import_module("torch._higher_order_ops.flex_attention")
        for name in ("FlexAttentionHOP", "math_attention", "sdpa_dense_backward"):
            getattr(module, name)
        permute_strides(module)
    return module


def gives_maxima(module: ModuleType) -> bool:
    """Does the module of :func:`flex_attention` return each row's greatest score, too?

    That came after PyTorch 2.8, with a backward pass that takes ``None`` for a gradient of zeros.
    """
    results = typing.get_args(typing.get_type_hints(module.math_attention)["return"])
    return len(results) > 2


def permute_strides(module: ModuleType) -> Callable[..., Any]:
    """A function of the module of :func:`flex_attention`: a tensor whose dimensions lie in the
    order of the strides."""
    return module._permute_strides  # type: ignore[no-any-return]
