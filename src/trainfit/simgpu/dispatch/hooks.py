"""What others attach to the engine: modes, and callbacks for what happens in it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from trainfit.simgpu.dispatch.registry import OperatorInfo

LaunchListener = Callable[[OperatorInfo, Any, tuple[Any, ...], dict[str, Any], Any], None]


class Hooks:
    """Each does nothing until it is set."""

    def __init__(self) -> None:
        #: Makes the dispatch mode, which PyTorch takes off its stack to call the engine.
        self.mode: Callable[[Any], Any] = contextlib.nullcontext
        #: Makes the mode for Python that names devices.
        self.function_mode: Callable[[Any], Any] = contextlib.nullcontext
        #: Called when a library is used for the first time.
        self.on_library: Callable[[], None] = lambda: None
        #: Called when the simulator starts to run (was the script running?), and when the script
        #: resumes.
        self.on_enter: Callable[[], bool] = lambda: False
        self.on_leave: Callable[[], None] = lambda: None
        #: Is told of every operator that may launch kernels, with its geometry's key.
        self.on_launch: LaunchListener = lambda *_: None
        #: Is told when random numbers are drawn on the device.
        self.on_random: Callable[[], None] = lambda: None
