"""The memory of bitsandbytes' 8-bit optimizers, without bitsandbytes (whose kernels need a GPU)."""

from __future__ import annotations

from typing import Any, Final

import torch

#: bitsandbytes/optim: classes and how many states each keeps for a parameter.
EIGHT_BIT: Final = {
    "Adam8bit": 2,
    "AdamW8bit": 2,
    "SGD8bit": 1,
    "RMSprop8bit": 1,
    "Adagrad8bit": 1,
}

#: ``min_8bit_size`` of bitsandbytes/optim/optimizer.py: smaller tensors keep float32 states.
MIN_ELEMENTS: Final = 4096
#: Elements that share one scale (``blocksize`` there; 2048 before version 0.44).
BLOCK: Final = 256
#: ``fill_qmap``: each of the two maps from a byte to its value.
MAP_ELEMENTS: Final = 256


class EightBitOptimizer(torch.optim.Optimizer):
    """States as ``Optimizer1State.init_state`` and ``Optimizer2State.init_state`` make them.

    A tensor of :data:`MIN_ELEMENTS` or more has for each state one byte an element and one
    float32 scale a block; a smaller one float32 states. The update is one kernel in place.
    """

    def __init__(self, params: Any, states: int) -> None:
        super().__init__(params, {"lr": 1e-3})
        self._states = states
        self._maps: list[torch.Tensor] = []

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Make the states of parameters that have none, and update in place."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    if parameter not in self.state:
                        self.state[parameter] = self._state_of(parameter)
                    parameter.add_(parameter.grad, alpha=-group["lr"])
        return loss

    def _state_of(self, parameter: torch.Tensor) -> dict[str, torch.Tensor]:
        small = parameter.numel() < MIN_ELEMENTS
        dtype = torch.float32 if small else torch.uint8
        state = {
            f"state{number}": torch.zeros_like(parameter, dtype=dtype)
            for number in range(1, self._states + 1)
        }
        if small:
            return state
        while len(self._maps) < self._states:
            self._maps.append(torch.zeros(MAP_ELEMENTS, device=parameter.device))
        blocks = -(-parameter.numel() // BLOCK)
        for number in range(1, self._states + 1):
            state[f"absmax{number}"] = torch.zeros(blocks, device=parameter.device)
            state[f"qmap{number}"] = self._maps[number - 1]
        return state
