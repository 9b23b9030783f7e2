"""The models of the campaign, with random weights and random data; nothing is downloaded.

Most are written here in plain PyTorch, so that a case means the same on every machine; some
come from torchvision, timm, transformers or LeRobot where those are installed. The values of
weights and data do not matter: only shapes, dtypes and the order of operators do.

Shapes: B batch, C channels, H and W height and width, T tokens, D width of the model.
"""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "act"
CLASSES = 1000
LLAMA_WORDS = 32_000

#: Nested tuples, lists and dictionaries of CPU tensors.
Batch = Any


@dataclasses.dataclass(frozen=True)
class Model:
    """How to make a model, a batch for it, and the loss of one.

    ``build(**options)`` gives a module on the CPU, ``batch(size)`` CPU tensors, ``loss(module,
    batch)`` a scalar from tensors on the GPU. ``needs`` are the packages without which it
    cannot be made; ``options`` are the choices that ``build`` takes.
    """

    build: Callable[..., nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    needs: tuple[str, ...] = ()
    options: tuple[str, ...] = ()


# -- convolutional networks ------------------------------------------------------------------------


def images(size: int, side: int = 224) -> Batch:
    return torch.randn(size, 3, side, side), torch.randint(0, CLASSES, (size,))


def classify(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]), batch[1])


def vgg16() -> nn.Module:
    """VGG16 without batch norm (torchvision's configuration D)."""
    layers: list[nn.Module] = []
    width = 3
    for stage in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(stage[1]):
            layers += [nn.Conv2d(width, stage[0], 3, padding=1), nn.ReLU(inplace=True)]
            width = stage[0]
        layers.append(nn.MaxPool2d(2))
    head = [
        nn.AdaptiveAvgPool2d(7),
        nn.Flatten(),
        *(nn.Linear(512 * 49, 4096), nn.ReLU(inplace=True), nn.Dropout()),
        *(nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout()),
        nn.Linear(4096, CLASSES),
    ]
    return nn.Sequential(*layers, *head)


class ResidualBlock(nn.Module):
    """ResNet's basic (two 3x3) or bottleneck (1x1, 3x3, 1x1) block."""

    def __init__(self, inputs: int, width: int, stride: int, bottleneck: bool) -> None:
        super().__init__()
        outputs = width * 4 if bottleneck else width
        if bottleneck:
            parts = ((inputs, width, 1, 1), (width, width, 3, stride), (width, outputs, 1, 1))
        else:
            parts = ((inputs, width, 3, stride), (width, outputs, 3, 1))
        body: list[nn.Module] = []
        for source, target, kernel, step in parts:
            body += [
                nn.Conv2d(source, target, kernel, step, padding=kernel // 2, bias=False),
                nn.BatchNorm2d(target),
                nn.ReLU(inplace=True),
            ]
        self.body = nn.Sequential(*body[:-1])
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))


class ResNet(nn.Module):
    """ResNet-18 (2, 2, 2, 2) or, with bottlenecks, ResNet-50 (3, 4, 6, 3)."""

    def __init__(
        self, depths: tuple[int, ...], bottleneck: bool, checkpointing: bool = False
    ) -> None:
        super().__init__()
        self.checkpointing = checkpointing
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(64),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, padding=1),
        )
        blocks: list[nn.Module] = []
        inputs = 64
        for stage, depth in enumerate(depths):
            width = 64 << stage
            for index in range(depth):
                stride = 2 if stage and index == 0 else 1
                blocks.append(ResidualBlock(inputs, width, stride, bottleneck))
                inputs = width * 4 if bottleneck else width
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(through(self.blocks, self.stem(x), self.checkpointing))


def through(blocks: nn.ModuleList, x: Tensor, checkpointing: bool) -> Tensor:
    """``x`` through ``blocks``, whose activations are recomputed when checkpointing."""
    for block in blocks:
        x = checkpoint(block, x, use_reentrant=False) if checkpointing else block(x)
    return x


def resnet18() -> nn.Module:
    return ResNet((2, 2, 2, 2), False)


def resnet50(checkpointing: bool = False) -> nn.Module:
    return ResNet((3, 4, 6, 3), True, checkpointing)


class ConvNextBlock(nn.Module):
    """Depthwise 7x7, layer norm over channels, two linear layers, layer scale."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.depthwise = nn.Conv2d(width, width, 7, padding=3, groups=width)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )
        self.scale = nn.Parameter(torch.full((width,), 1e-6))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depthwise(x).permute(0, 2, 3, 1)
        y = self.scale * self.mlp(self.norm(y))
        return x + y.permute(0, 3, 1, 2)


class ChannelNorm(nn.LayerNorm):
    """Layer norm over the channels of (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def convnext_tiny() -> nn.Module:
    """ConvNeXt-T: depths 3, 3, 9, 3; widths 96 to 768."""
    layers: list[nn.Module] = []
    width = 3
    for stage, depth in enumerate((3, 3, 9, 3)):
        inputs, width = width, 96 << stage
        if stage == 0:
            layers += [nn.Conv2d(inputs, width, 4, 4), ChannelNorm(width, eps=1e-6)]
        else:
            layers += [ChannelNorm(inputs, eps=1e-6), nn.Conv2d(inputs, width, 2, 2)]
        layers += [ConvNextBlock(width) for _ in range(depth)]
    head = (nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(width), nn.Linear(width, CLASSES))
    return nn.Sequential(*layers, *head)


def double_convolution(inputs: int, outputs: int) -> nn.Module:
    layers: list[nn.Module] = []
    for source in (inputs, outputs):
        layers += [
            nn.Conv2d(source, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


class UNet(nn.Module):
    """U-Net with transposed convolutions, four levels, 64 to 1024 channels, two classes."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        self.down = nn.ModuleList(
            double_convolution(a, b) for a, b in zip([3, *widths], widths, strict=False)
        )
        pairs = list(zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.grow = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.up = nn.ModuleList(double_convolution(2 * b, b) for _, b in pairs)
        self.head = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        for index, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if index else x)
            kept.append(x)
        kept.pop()
        for grow, block in zip(self.grow, self.up, strict=True):
            x = block(torch.cat((kept.pop(), grow(x)), dim=1))
        return self.head(x)


def masks(size: int, side: int = 256) -> Batch:
    return torch.randn(size, 3, side, side), torch.randint(0, 2, (size, side, side))


class SingleShotDetector(nn.Module):
    """SSD-like: ResNet-18 trunk, four maps, six boxes a place; dense losses, no matching."""

    BOXES, KINDS = 6, 81

    def __init__(self) -> None:
        super().__init__()
        self.trunk = resnet18()
        extra = [(512, 256), (256, 256)]
        self.extra = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(a, b // 2, 1),
                nn.ReLU(inplace=True),
                nn.Conv2d(b // 2, b, 3, 2, padding=1),
                nn.ReLU(inplace=True),
            )
            for a, b in extra
        )
        widths = (256, 512, 256, 256)
        self.kinds = nn.ModuleList(nn.Conv2d(w, self.BOXES * self.KINDS, 3, 1, 1) for w in widths)
        self.places = nn.ModuleList(nn.Conv2d(w, self.BOXES * 4, 3, 1, 1) for w in widths)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, 3, H, W) -> scores (B, boxes, kinds) and places (B, boxes, 4)."""
        x = self.trunk.stem(x)
        maps = []
        for index, block in enumerate(self.trunk.blocks):
            x = block(x)
            if index in (5, 7):
                maps.append(x)
        for block in self.extra:
            x = block(x)
            maps.append(x)
        scores = [spread(head(m), self.KINDS) for head, m in zip(self.kinds, maps, strict=True)]
        places = [spread(head(m), 4) for head, m in zip(self.places, maps, strict=True)]
        return torch.cat(scores, 1), torch.cat(places, 1)


def spread(x: Tensor, last: int) -> Tensor:
    """(B, boxes*last, H, W) -> (B, H*W*boxes, last)."""
    return x.permute(0, 2, 3, 1).reshape(x.shape[0], -1, last)


def boxes(size: int, side: int = 300) -> Batch:
    count = 6 * (19 * 19 + 10 * 10 + 5 * 5 + 3 * 3)
    kinds = torch.randint(0, SingleShotDetector.KINDS, (size, count))
    return torch.randn(size, 3, side, side), kinds, torch.randn(size, count, 4)


def detect(model: nn.Module, batch: Batch) -> Tensor:
    scores, places = model(batch[0])
    matched = functional.cross_entropy(scores.transpose(1, 2), batch[1])
    return matched + functional.smooth_l1_loss(places, batch[2])


# -- transformers and recurrent networks -----------------------------------------------------------


class Attention(nn.Module):
    """Multi-head attention, by PyTorch's fused operator or written out."""

    def __init__(self, width: int, heads: int, fused: bool, causal: bool, dropout: float) -> None:
        super().__init__()
        self.heads, self.fused, self.causal = heads, fused, causal
        self.project = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        size, tokens, width = x.shape
        parts = self.project(x).view(size, tokens, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4).unbind(0)
        dropout = self.dropout if self.training else 0.0
        if self.fused:
            y = functional.scaled_dot_product_attention(
                query, key, value, dropout_p=dropout, is_causal=self.causal
            )
        else:
            scores = query @ key.transpose(-2, -1) * (width // self.heads) ** -0.5
            if self.causal:
                future = torch.ones(tokens, tokens, dtype=torch.bool, device=x.device).triu(1)
                scores = scores.masked_fill(future, float("-inf"))
            y = functional.dropout(scores.softmax(-1), dropout) @ value
        return self.out(y.transpose(1, 2).reshape(size, tokens, width))


class TransformerBlock(nn.Module):
    """Layer norm before attention and before the two linear layers."""

    def __init__(
        self, width: int, heads: int, fused: bool, causal: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads, fused, causal, dropout)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class VisionTransformer(nn.Module):
    """ViT-B/16 at 224 pixels unless said otherwise: 12 blocks of width 768, 12 heads."""

    def __init__(self, depth: int, width: int, heads: int, fused: bool, checkpointing: bool):
        super().__init__()
        self.checkpointing = checkpointing
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.places = nn.Parameter(torch.zeros(1, 197, width))
        self.blocks = nn.ModuleList(TransformerBlock(width, heads, fused) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.token.expand(len(x), -1, -1), x), dim=1) + self.places
        return self.head(self.norm(through(self.blocks, x, self.checkpointing))[:, 0])


def vit_b16(attention: str = "fused", checkpointing: bool = False) -> nn.Module:
    return VisionTransformer(12, 768, 12, attention == "fused", checkpointing)


def vit_s16(attention: str = "fused", checkpointing: bool = False) -> nn.Module:
    return VisionTransformer(12, 384, 6, attention == "fused", checkpointing)


class LanguageModel(nn.Module):
    """Token and place embeddings, transformer blocks, a head that shares the embedding."""

    def __init__(
        self, depth: int, width: int, heads: int, tokens: int, words: int, causal: bool,
        fused: bool, checkpointing: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.checkpointing = checkpointing
        self.words, self.places = nn.Embedding(words, width), nn.Embedding(tokens, width)
        self.dropout = nn.Dropout(0.1)
        self.blocks = nn.ModuleList(
            TransformerBlock(width, heads, fused, causal, 0.1) for _ in range(depth)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.words(tokens) + self.places(places))
        return self.head(self.norm(through(self.blocks, x, self.checkpointing)))


GPT2_WORDS, GPT2_TOKENS = 50257, 1024
BERT_WORDS, BERT_TOKENS = 30522, 512


def gpt2(attention: str = "fused", checkpointing: bool = False) -> nn.Module:
    """GPT-2 small: 12 blocks of width 768, 1024 tokens."""
    fused = attention == "fused"
    return LanguageModel(12, 768, 12, GPT2_TOKENS, GPT2_WORDS, True, fused, checkpointing)


def bert_base(attention: str = "fused", checkpointing: bool = False) -> nn.Module:
    """BERT-base's size with the layer norms first: 12 blocks of width 768, 512 tokens."""
    fused = attention == "fused"
    return LanguageModel(12, 768, 12, BERT_TOKENS, BERT_WORDS, False, fused, checkpointing)


def text(words: int, length: int) -> Callable[[int], Batch]:
    return lambda size: torch.randint(0, words, (size, length))


def next_word(model: nn.Module, tokens: Tensor) -> Tensor:
    scores = model(tokens)
    return functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def every_word(model: nn.Module, tokens: Tensor) -> Tensor:
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


class LstmTagger(nn.Module):
    """Embedding, two LSTM layers in both directions with dropout, a score for each word."""

    def __init__(self, cell: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        self.words = nn.Embedding(20000, 256)
        self.recurrent = cell(
            256, 512, num_layers=2, batch_first=True, bidirectional=True, dropout=0.2
        )
        self.head = nn.Linear(1024, 50)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.recurrent(self.words(tokens))[0])


def tag(model: nn.Module, batch: Batch) -> Tensor:
    return functional.cross_entropy(model(batch[0]).flatten(0, 1), batch[1].flatten())


def tagged(size: int, length: int = 128) -> Batch:
    return torch.randint(0, 20000, (size, length)), torch.randint(0, 50, (size, length))


def perceptron() -> nn.Module:
    """Four wide linear layers: parameters and optimizer states are nearly everything."""
    width = 4096
    layers: list[nn.Module] = []
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(width, CLASSES))


def vectors(size: int) -> Batch:
    return torch.randn(size, 4096), torch.randint(0, CLASSES, (size,))


# -- ACT -------------------------------------------------------------------------------------------

CAMERAS = {"head": (360, 640), "wrist_left": (480, 640), "wrist_right": (480, 640)}
CHUNK, JOINTS = 30, 26


def act() -> nn.Module:
    """The policy of examples/act with its defaults."""
    spec = importlib.util.spec_from_file_location("trainfit_example_act", EXAMPLE / "model.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up there
    spec.loader.exec_module(module)
    return module.ACTPolicy()


def demonstrations(size: int) -> Batch:
    return {
        "state": torch.randn(size, JOINTS),
        "action": torch.randn(size, CHUNK, JOINTS),
        "is_pad": torch.zeros(size, CHUNK, dtype=torch.bool),
        **{name: torch.rand(size, 3, *shape) for name, shape in CAMERAS.items()},
    }


def act_lerobot() -> nn.Module:
    """LeRobot's own ACT policy for the same cameras, state and chunk."""
    types = importlib.import_module("lerobot.configs.types")
    configuration = importlib.import_module("lerobot.policies.act.configuration_act")
    modeling = importlib.import_module("lerobot.policies.act.modeling_act")
    cameras = {
        f"observation.images.{name}": types.PolicyFeature(types.FeatureType.VISUAL, (3, *shape))
        for name, shape in CAMERAS.items()
    }
    state = types.PolicyFeature(types.FeatureType.STATE, (JOINTS,))
    action = types.PolicyFeature(types.FeatureType.ACTION, (JOINTS,))
    config = configuration.ACTConfig(
        chunk_size=CHUNK,
        n_action_steps=CHUNK,
        device="cpu",
        pretrained_backbone_weights=None,
        input_features={"observation.state": state, **cameras},
        output_features={"action": action},
    )
    return modeling.ACTPolicy(config)


def lerobot_demonstrations(size: int) -> Batch:
    batch = demonstrations(size)
    views = {f"observation.images.{name}": batch[name] for name in CAMERAS}
    return {
        "observation.state": batch["state"],
        "action": batch["action"],
        "action_is_pad": batch["is_pad"],
        **views,
    }


def first_of(model: nn.Module, batch: Batch) -> Tensor:
    return model(batch)[0]


# -- from libraries --------------------------------------------------------------------------------


def from_torchvision(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return getattr(importlib.import_module("torchvision.models"), name)(weights=None)

    return build


def from_timm(name: str) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        return importlib.import_module("timm").create_model(name, pretrained=False)

    return build


def faster_rcnn() -> nn.Module:
    detection = importlib.import_module("torchvision.models.detection")
    return detection.fasterrcnn_resnet50_fpn(weights=None, weights_backbone=None)


def scenes(size: int) -> Batch:
    """Pictures of 480 x 640 with four boxes each."""
    corners = torch.tensor([[10.0, 10.0], [100.0, 50.0], [200.0, 200.0], [300.0, 100.0]])
    targets = [
        {"boxes": torch.cat((corners, corners + 80), 1), "labels": torch.tensor([1, 2, 3, 4])}
        for _ in range(size)
    ]
    return [torch.rand(3, 480, 640) for _ in range(size)], targets


def all_losses(model: nn.Module, batch: Batch) -> Tensor:
    return sum(model(*batch).values())  # type: ignore[return-value]


def hf_bert_large() -> nn.Module:
    """bert-large-uncased's configuration for classification, as in Hugging Face's guide."""
    transformers = importlib.import_module("transformers")
    config = transformers.BertConfig(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    )
    return transformers.BertForSequenceClassification(config)


def hf_gpt2() -> nn.Module:
    transformers = importlib.import_module("transformers")
    return transformers.GPT2LMHeadModel(transformers.GPT2Config())


def hf_llama(lora: bool = False) -> Callable[..., nn.Module]:
    """Llama's architecture with 0.6 billion parameters, or with adapters of rank 16 to train."""

    def build(checkpointing: bool = False) -> nn.Module:
        transformers = importlib.import_module("transformers")
        config = transformers.LlamaConfig(
            vocab_size=LLAMA_WORDS,
            hidden_size=2048,
            intermediate_size=5632,
            num_hidden_layers=12,
            num_attention_heads=16,
            num_key_value_heads=4,
            max_position_embeddings=8192,
        )
        model = transformers.LlamaForCausalLM(config)
        if lora:
            peft = importlib.import_module("peft")
            targets = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
            model = peft.get_peft_model(model, peft.LoraConfig(r=16, target_modules=targets))
        if checkpointing:
            model.gradient_checkpointing_enable()
        return model

    return build


def llama_text(length: int) -> Callable[[int], Batch]:
    def batch(size: int) -> Batch:
        words = torch.randint(0, LLAMA_WORDS, (size, length))
        return {"input_ids": words, "labels": words}

    return batch


def continued(model: nn.Module, batch: Batch) -> Tensor:
    """32 tokens more, greedily."""
    prompt = batch["input_ids"]
    ones = torch.ones_like(prompt)
    return model.generate(  # type: ignore[operator]
        prompt, attention_mask=ones, max_new_tokens=32, min_new_tokens=32, do_sample=False,
        pad_token_id=0,
    )  # fmt: skip


def labelled_text(size: int) -> Batch:
    words = torch.randint(0, BERT_WORDS, (size, BERT_TOKENS))
    return {"input_ids": words, "labels": torch.randint(0, 2, (size,))}


def continued_text(size: int) -> Batch:
    words = torch.randint(0, GPT2_WORDS, (size, GPT2_TOKENS))
    return {"input_ids": words, "labels": words}


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss


_ATTENTION = ("attention", "checkpointing")
_LLAMA: dict[str, Any] = {"needs": ("transformers",), "options": ("checkpointing",)}

MODELS: dict[str, Model] = {
    "act": Model(act, demonstrations, first_of),
    "act_lerobot": Model(act_lerobot, lerobot_demonstrations, first_of, needs=("lerobot",)),
    "vgg16": Model(vgg16, images, classify),
    "resnet18": Model(resnet18, images, classify),
    "resnet50": Model(resnet50, images, classify, options=("checkpointing",)),
    "convnext_tiny": Model(convnext_tiny, images, classify),
    "unet": Model(UNet, masks, classify),
    "ssd": Model(SingleShotDetector, boxes, detect),
    "vit_b16": Model(vit_b16, images, classify, options=_ATTENTION),
    "vit_s16": Model(vit_s16, images, classify, options=_ATTENTION),
    "gpt2": Model(gpt2, text(GPT2_WORDS, GPT2_TOKENS), next_word, options=_ATTENTION),
    "bert_base": Model(bert_base, text(BERT_WORDS, BERT_TOKENS), every_word, options=_ATTENTION),
    "lstm": Model(LstmTagger, tagged, tag),
    "gru": Model(lambda: LstmTagger(nn.GRU), tagged, tag),
    "mlp": Model(perceptron, vectors, classify),
    "tv_swin_t": Model(from_torchvision("swin_t"), images, classify, needs=("torchvision",)),
    "tv_vgg16": Model(from_torchvision("vgg16"), images, classify, needs=("torchvision",)),
    "tv_mobilenet_v3": Model(
        from_torchvision("mobilenet_v3_large"), images, classify, needs=("torchvision",)
    ),
    "tv_faster_rcnn": Model(faster_rcnn, scenes, all_losses, needs=("torchvision",)),
    "timm_convnext_tiny": Model(from_timm("convnext_tiny"), images, classify, needs=("timm",)),
    "timm_vit_b16": Model(from_timm("vit_base_patch16_224"), images, classify, needs=("timm",)),
    "timm_efficientnet_b0": Model(from_timm("efficientnet_b0"), images, classify, needs=("timm",)),
    "hf_bert_large": Model(hf_bert_large, labelled_text, own_loss, needs=("transformers",)),
    "timm_swin_tiny": Model(
        from_timm("swin_tiny_patch4_window7_224"), images, classify, needs=("timm",)
    ),
    "hf_llama_1k": Model(hf_llama(), llama_text(1024), own_loss, **_LLAMA),
    "hf_llama_4k": Model(hf_llama(), llama_text(4096), own_loss, **_LLAMA),
    "hf_llama_text": Model(hf_llama(), llama_text(128), continued, **_LLAMA),
    "peft_llama_1k": Model(hf_llama(lora=True), llama_text(1024), own_loss, needs=("peft",)),
    "hf_gpt2": Model(hf_gpt2, continued_text, own_loss, needs=("transformers",)),
}
