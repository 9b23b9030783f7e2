"""lerobot's ACT policy in a plain loop, on frames made up."""

import sys
import types

import torch
from common import device, options

# lerobot imports all of its policies, of which GR00T's needs an older transformers.
groot = types.ModuleType("lerobot.policies.groot.configuration_groot")
groot.GrootConfig = type("GrootConfig", (), {})
sys.modules["lerobot.policies.groot"] = types.ModuleType("lerobot.policies.groot")
sys.modules[groot.__name__] = groot

from lerobot.configs.types import FeatureType, PolicyFeature  # noqa: E402
from lerobot.policies.act.configuration_act import ACTConfig  # noqa: E402
from lerobot.policies.act.modeling_act import ACTPolicy  # noqa: E402

args = options(4)
gpu = device()
image, state = "observation.images.top", "observation.state"
config = ACTConfig(
    input_features={
        image: PolicyFeature(FeatureType.VISUAL, (3, 96, 96)),
        state: PolicyFeature(FeatureType.STATE, (6,)),
    },
    output_features={"action": PolicyFeature(FeatureType.ACTION, (6,))},
    pretrained_backbone_weights=None,
    dim_model=128,
    dim_feedforward=512,
    n_heads=4,
    chunk_size=20,
    n_action_steps=20,
    device=gpu.type,
)
policy = ACTPolicy(config).to(gpu).train()
optimizer = torch.optim.AdamW(policy.get_optim_params(), lr=1e-5, weight_decay=1e-4)
rows = [
    {
        image: torch.rand(3, 96, 96),
        state: torch.rand(6),
        "action": torch.rand(20, 6),
        "action_is_pad": torch.zeros(20, dtype=torch.bool),
    }
    for _ in range(256)
]
for batch in torch.utils.data.DataLoader(rows, args.batch_size, shuffle=True):
    loss, _ = policy.forward({name: value.to(gpu) for name, value in batch.items()})
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 10.0)
    optimizer.step()
    optimizer.zero_grad()
