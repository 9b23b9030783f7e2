"""An Action Chunking Transformer (ACT) policy in plain PyTorch.

The architecture follows the ACT policy of LeRobot: a ResNet-18 with frozen batch norm turns each
camera image into tokens, a Transformer encoder reads them together with a latent and the robot
state, and a Transformer decoder answers one action per query. While training, a second encoder
(the VAE encoder) squeezes the true action chunk into the latent.

Letters used in shapes: B batch, C channels, D model width, K chunk size (actions a chunk),
L latent width, S encoder tokens.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

LATENT_DIM = 32


@dataclass(frozen=True)
class ACTConfig:
    """Sizes of the policy; the defaults are LeRobot's, with the chunk of the reference run."""

    cameras: tuple[str, ...] = ("head", "wrist_left", "wrist_right")
    state_dim: int = 26
    action_dim: int = 26
    chunk_size: int = 30
    dim: int = 512
    heads: int = 8
    ffn: int = 3200
    layers: int = 4
    decoder_layers: int = 1
    vae_layers: int = 4
    dropout: float = 0.1
    kl_weight: float = 10.0


class FrozenBatchNorm2d(nn.Module):
    """Batch norm whose statistics and affine terms never change.

    All four tensors are float32 buffers, not parameters. Under autocast the matmul with them
    promotes the feature map back to float32, as torchvision's layer of the same name does.
    """

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.register_buffer("weight", torch.ones(channels))
        self.register_buffer("bias", torch.zeros(channels))
        self.register_buffer("running_mean", torch.zeros(channels))
        self.register_buffer("running_var", torch.ones(channels))

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, C, H, W)."""
        scale = self.weight * (self.running_var + self.eps).rsqrt()
        shift = self.bias - self.running_mean * scale
        return x * scale.view(1, -1, 1, 1) + shift.view(1, -1, 1, 1)


class BasicBlock(nn.Module):
    """Two 3x3 convolutions with a shortcut, the block of ResNet-18."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(c_in, c_out, 3, stride, padding=1, bias=False)
        self.bn1 = FrozenBatchNorm2d(c_out)
        self.conv2 = nn.Conv2d(c_out, c_out, 3, padding=1, bias=False)
        self.bn2 = FrozenBatchNorm2d(c_out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample: nn.Module | None = None
        if stride != 1 or c_in != c_out:
            self.downsample = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), FrozenBatchNorm2d(c_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, c_in, H, W) -> (B, c_out, H/stride, W/stride), sizes rounded up."""
        shortcut = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += shortcut
        return self.relu(out)


class ResNet18(nn.Module):
    """ResNet-18 up to its last feature map (no pooling, no classifier), randomly initialised."""

    out_channels = 512

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)
        self.bn1 = FrozenBatchNorm2d(64)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1 = nn.Sequential(BasicBlock(64, 64, 1), BasicBlock(64, 64, 1))
        self.layer2 = nn.Sequential(BasicBlock(64, 128, 2), BasicBlock(128, 128, 1))
        self.layer3 = nn.Sequential(BasicBlock(128, 256, 2), BasicBlock(256, 256, 1))
        self.layer4 = nn.Sequential(BasicBlock(256, 512, 2), BasicBlock(512, 512, 1))
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) image -> (B, 512, ceil(H/32), ceil(W/32)) feature map."""
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


class FeedForward(nn.Module):
    """Linear, relu, dropout, linear."""

    def __init__(self, cfg: ACTConfig) -> None:
        super().__init__()
        self.linear1 = nn.Linear(cfg.dim, cfg.ffn)
        self.dropout = nn.Dropout(cfg.dropout)
        self.linear2 = nn.Linear(cfg.ffn, cfg.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(tokens, B, D) -> (tokens, B, D)."""
        return self.linear2(self.dropout(nn.functional.relu(self.linear1(x))))


def make_attention(cfg: ACTConfig) -> nn.MultiheadAttention:
    """Attention over (tokens, B, D), the layout LeRobot uses."""
    return nn.MultiheadAttention(cfg.dim, cfg.heads, dropout=cfg.dropout)


class EncoderLayer(nn.Module):
    """Self-attention and feed-forward, each followed by dropout, sum and layer norm."""

    def __init__(self, cfg: ACTConfig) -> None:
        super().__init__()
        self.self_attn = make_attention(cfg)
        self.ffn = FeedForward(cfg)
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.dropout1 = nn.Dropout(cfg.dropout)
        self.dropout2 = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, pos: Tensor, is_pad: Tensor | None = None) -> Tensor:
        """x (S, B, D), pos (S, 1, D), is_pad (B, S) bool, True where a key is ignored."""
        q = k = x + pos
        # The weights are asked for and thrown away, as in LeRobot: that default keeps PyTorch
        # off the fused attention kernels and so decides the memory the layer needs.
        attended, _ = self.self_attn(q, k, value=x, key_padding_mask=is_pad)
        x = self.norm1(x + self.dropout1(attended))
        return self.norm2(x + self.dropout2(self.ffn(x)))


class DecoderLayer(nn.Module):
    """Self-attention over the queries, attention to the encoder, feed-forward."""

    def __init__(self, cfg: ACTConfig) -> None:
        super().__init__()
        self.self_attn = make_attention(cfg)
        self.cross_attn = make_attention(cfg)
        self.ffn = FeedForward(cfg)
        self.norm1 = nn.LayerNorm(cfg.dim)
        self.norm2 = nn.LayerNorm(cfg.dim)
        self.norm3 = nn.LayerNorm(cfg.dim)
        self.dropout1 = nn.Dropout(cfg.dropout)
        self.dropout2 = nn.Dropout(cfg.dropout)
        self.dropout3 = nn.Dropout(cfg.dropout)

    def forward(self, x: Tensor, pos: Tensor, memory: Tensor, memory_pos: Tensor) -> Tensor:
        """x (K, B, D), pos (K, 1, D), memory (S, B, D), memory_pos (S, 1, D)."""
        q = k = x + pos
        attended, _ = self.self_attn(q, k, value=x)
        x = self.norm1(x + self.dropout1(attended))
        attended, _ = self.cross_attn(x + pos, memory + memory_pos, value=memory)
        x = self.norm2(x + self.dropout2(attended))
        return self.norm3(x + self.dropout3(self.ffn(x)))


def sine_table(positions: int, dim: int) -> Tensor:
    """Sinusoidal position embedding of a sequence, (positions, dim)."""
    angle = torch.arange(positions, dtype=torch.float64).unsqueeze(1) / wave_divisors(dim)
    table = torch.empty(positions, dim, dtype=torch.float64)
    table[:, 0::2] = angle[:, 0::2].sin()
    table[:, 1::2] = angle[:, 1::2].cos()
    return table.float()


def wave_divisors(dim: int) -> Tensor:
    """Divisors of the positions, (dim,): each sine and the cosine after it share one."""
    pair = torch.arange(dim, dtype=torch.float64) // 2
    return 10000.0 ** (2 * pair / dim)


class ImagePositions(nn.Module):
    """Sinusoidal 2-D position embedding: half of the channels for the row, half for the column."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.axis_dim = dim // 2

    def forward(self, feature_map: Tensor) -> Tensor:
        """(B, C, H, W) feature map -> (H*W, 1, D) float32; only H, W and the device are read."""
        height, width = feature_map.shape[-2:]
        rows = self._waves(height, feature_map.device)
        columns = self._waves(width, feature_map.device)
        grid = torch.cat(
            (
                rows.unsqueeze(1).expand(height, width, self.axis_dim),
                columns.unsqueeze(0).expand(height, width, self.axis_dim),
            ),
            dim=-1,
        )
        return grid.reshape(height * width, 1, 2 * self.axis_dim)

    def _waves(self, length: int, device: torch.device) -> Tensor:
        """(length, D/2); positions run from 2*pi/length to 2*pi, so map sizes are comparable."""
        position = torch.arange(1, length + 1, dtype=torch.float32, device=device)
        position = position / length * (2 * math.pi)
        divisor = wave_divisors(self.axis_dim).float().to(device)
        angle = position.unsqueeze(1) / divisor
        return torch.stack((angle[:, 0::2].sin(), angle[:, 1::2].cos()), dim=-1).flatten(1)


class ACTPolicy(nn.Module):
    """The policy with its training loss."""

    vae_pos: Tensor
    image_mean: Tensor
    image_std: Tensor

    def __init__(self, cfg: ACTConfig | None = None) -> None:
        super().__init__()
        self.cfg = cfg = cfg or ACTConfig()

        # VAE encoder over [cls, state, K actions].
        self.vae_encoder = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.vae_layers))
        self.vae_cls = nn.Embedding(1, cfg.dim)
        self.vae_state_proj = nn.Linear(cfg.state_dim, cfg.dim)
        self.vae_action_proj = nn.Linear(cfg.action_dim, cfg.dim)
        self.vae_latent_proj = nn.Linear(cfg.dim, 2 * LATENT_DIM)
        self.register_buffer("vae_pos", sine_table(2 + cfg.chunk_size, cfg.dim).unsqueeze(1))

        # One backbone serves all cameras.
        self.backbone = ResNet18()
        self.final_conv = nn.Conv2d(ResNet18.out_channels, cfg.dim, kernel_size=1)
        self.image_pos = ImagePositions(cfg.dim)
        # The usual image statistics, applied on the device.
        mean, std = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
        self.register_buffer("image_mean", torch.tensor(mean).view(1, 3, 1, 1))
        self.register_buffer("image_std", torch.tensor(std).view(1, 3, 1, 1))

        # Transformer over [latent, state, camera tokens].
        self.latent_proj = nn.Linear(LATENT_DIM, cfg.dim)
        self.state_proj = nn.Linear(cfg.state_dim, cfg.dim)
        self.token_pos = nn.Embedding(2, cfg.dim)
        self.encoder = nn.ModuleList(EncoderLayer(cfg) for _ in range(cfg.layers))
        self.decoder = nn.ModuleList(DecoderLayer(cfg) for _ in range(cfg.decoder_layers))
        self.decoder_norm = nn.LayerNorm(cfg.dim)
        self.query_pos = nn.Embedding(cfg.chunk_size, cfg.dim)
        self.action_head = nn.Linear(cfg.dim, cfg.action_dim)

        for part in (self.encoder, self.decoder):
            for parameter in part.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)

    def forward(self, batch: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss of a batch.

        batch: one (B, 3, H, W) float32 image in [0, 1] under each camera's name, `state`
        (B, state_dim), `action` (B, K, action_dim), `is_pad` (B, K) bool, True where the chunk
        runs past the end of its episode.

        Returns the scalar loss and its detached parts: `l1`, `kld` (nats a sample).
        """
        mean, log_var = self.encode_latent(batch["state"], batch["action"], batch["is_pad"])
        latent = mean + (log_var / 2).exp() * torch.randn_like(mean)
        predicted = self.predict(batch, latent)

        error = nn.functional.l1_loss(predicted, batch["action"], reduction="none")
        l1 = (error * ~batch["is_pad"].unsqueeze(-1)).mean()
        kld = (-0.5 * (1 + log_var - mean.pow(2) - log_var.exp())).sum(-1).mean()
        loss = l1 + self.cfg.kl_weight * kld
        return loss, {"l1": l1.detach(), "kld": kld.detach()}

    def encode_latent(self, state: Tensor, action: Tensor, is_pad: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and log variance of the latent, each (B, L), from the true action chunk."""
        size = state.shape[0]
        tokens = torch.cat(
            (
                self.vae_cls.weight.unsqueeze(0).expand(size, -1, -1),
                self.vae_state_proj(state).unsqueeze(1),
                self.vae_action_proj(action),
            ),
            dim=1,
        )
        # The class token and the state are never padding.
        never_pad = torch.zeros(size, 2, dtype=torch.bool, device=is_pad.device)
        mask = torch.cat((never_pad, is_pad), dim=1)
        x = tokens.transpose(0, 1)
        for layer in self.vae_encoder:
            x = layer(x, self.vae_pos, mask)
        mean, log_var = self.vae_latent_proj(x[0]).chunk(2, dim=-1)
        return mean, log_var

    def predict(self, batch: dict[str, Tensor], latent: Tensor | None = None) -> Tensor:
        """Action chunk (B, K, action_dim); without a latent (B, L), the prior's mean is used."""
        if latent is None:
            latent = batch["state"].new_zeros(batch["state"].shape[0], LATENT_DIM)
        memory, pos = self.encoder_tokens(batch, latent)
        for layer in self.encoder:
            memory = layer(memory, pos)

        x = torch.zeros(
            self.cfg.chunk_size, memory.shape[1], self.cfg.dim, dtype=pos.dtype, device=pos.device
        )
        query_pos = self.query_pos.weight.unsqueeze(1)
        for layer in self.decoder:
            x = layer(x, query_pos, memory, pos)
        return self.action_head(self.decoder_norm(x).transpose(0, 1))

    def encoder_tokens(self, batch: dict[str, Tensor], latent: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens (S, B, D) of latent, state and all cameras, and their positions (S, 1, D)."""
        tokens = [
            self.latent_proj(latent).unsqueeze(0),
            self.state_proj(batch["state"]).unsqueeze(0),
        ]
        positions = [self.token_pos.weight.unsqueeze(1)]
        for camera in self.cfg.cameras:
            # Cameras differ in size, so each goes through the backbone on its own.
            features = self.backbone((batch[camera] - self.image_mean) / self.image_std)
            positions.append(self.image_pos(features).to(features.dtype))
            tokens.append(self.final_conv(features).flatten(2).permute(2, 0, 1))
        return torch.cat(tokens), torch.cat(positions)
