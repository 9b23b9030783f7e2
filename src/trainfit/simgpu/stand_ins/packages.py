"""The packages that there are stand-ins for."""

from __future__ import annotations

from typing import Final

from trainfit.simgpu.stand_ins.absent import StandIn
from trainfit.simgpu.stand_ins.flash_attention import FLASH_ATTN
from trainfit.simgpu.stand_ins.selective_scan import CAUSAL_CONV1D
from trainfit.simgpu.stand_ins.state_space_dual import MAMBA_SSM
from trainfit.simgpu.stand_ins.triton_language import TRITON
from trainfit.simgpu.stand_ins.xformers import XFORMERS

#: By the name that is imported.
STAND_INS: Final[dict[str, StandIn]] = {
    "causal_conv1d": CAUSAL_CONV1D,
    "flash_attn": FLASH_ATTN,
    "mamba_ssm": MAMBA_SSM,
    "triton": TRITON,
    "xformers": XFORMERS,
}
