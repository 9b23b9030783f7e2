"""The cases of other people's models: what is trained, how, at which batch size. Data only.

``languages.py`` and ``families.py`` hold the jobs. PyTorch is not needed to read this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from gpu.cases import Case, interleaved

#: transformers' configurations, as published with the weights (or, tiny-mixtral, of that form).
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama-1b": ("llama", {
        "vocab_size": 128256, "hidden_size": 2048, "intermediate_size": 8192,
        "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "tie_word_embeddings": True}),
    "llama-8b": ("llama", {
        "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 131072}),
    "mistral-7b": ("mistral", {
        "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "max_position_embeddings": 32768, "sliding_window": None}),
    "qwen-0.5b": ("qwen2", {
        "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864,
        "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "max_position_embeddings": 32768, "tie_word_embeddings": True}),
    "qwen3-0.6b": ("qwen3", {
        "vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128,
        "num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8,
        "max_position_embeddings": 40960, "tie_word_embeddings": True}),
    "gemma2-2b": ("gemma2", {
        "vocab_size": 256000, "hidden_size": 2304, "intermediate_size": 9216, "head_dim": 256,
        "num_hidden_layers": 26, "num_attention_heads": 8, "num_key_value_heads": 4,
        "max_position_embeddings": 8192}),
    "mixtral-small": ("mixtral", {
        "vocab_size": 32000, "hidden_size": 1024, "intermediate_size": 3584,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4,
        "num_local_experts": 8, "max_position_embeddings": 8192}),
    "smollm-135m": ("llama", {
        "vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536,
        "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "max_position_embeddings": 8192, "tie_word_embeddings": True}),
}  # fmt: skip


@dataclass(frozen=True)
class Language:
    """A job on a causal language model of ``shape``, samples of ``tokens``.

    ``weights`` is their precision, or nf4 (double quantization) or int8; ``rank`` above 0 trains
    adapters of that rank; ``loss``: of the model, in chunks, or by liger's kernels.
    """

    shape: str
    tokens: int
    weights: str = "bf16"
    amp: bool = False
    rank: int = 0
    checkpointing: str = ""
    attention: str = "sdpa"
    optimizer: str = "default"
    loss: str = "model"
    trainer: tuple[tuple[str, Any], ...] | None = None
    new_tokens: int = 0
    generation: tuple[tuple[str, Any], ...] = ()


_TRAINER_DEFAULTS: tuple[tuple[str, Any], ...] = ()
_TRAINER_USUAL = (("bf16", True), ("gradient_checkpointing", True))

LANGUAGE: dict[str, tuple[int, Language]] = {
    "llama1b-full-fused": (2, Language("llama-1b", 2048, optimizer="fused")),
    "llama1b-full-checkpointing": (
        1, Language("llama-1b", 4096, checkpointing="nonreentrant")),
    "llama1b-full-amp": (1, Language("llama-1b", 1024, weights="fp32", amp=True)),
    "llama1b-full-8bit": (
        2, Language("llama-1b", 1024, optimizer="8bit", checkpointing="reentrant")),
    "llama1b-full-backward": (
        1, Language("llama-1b", 2048, optimizer="backward", checkpointing="nonreentrant")),
    "llama1b-full-chunked": (
        2, Language("llama-1b", 2048, loss="chunked", checkpointing="nonreentrant")),
    "llama1b-full-liger": (2, Language("llama-1b", 2048, loss="liger", optimizer="loop")),
    "llama1b-lora-eager": (1, Language("llama-1b", 2048, rank=16, attention="eager")),
    "qwen05b-trainer-defaults": (
        2, Language("qwen-0.5b", 512, weights="fp32", trainer=_TRAINER_DEFAULTS)),
    "qwen05b-trainer-bf16": (4, Language("qwen-0.5b", 1024, "fp32", trainer=_TRAINER_USUAL)),
    "qwen05b-trainer-evaluates": (
        4, Language("qwen-0.5b", 512, trainer=(("evaluates", True),))),
    "qwen3-06b-full": (4, Language("qwen3-0.6b", 1024, optimizer="loop")),
    "mistral7b-lora": (
        1, Language("mistral-7b", 4096, rank=16, checkpointing="nonreentrant")),
    "llama8b-lora": (1, Language("llama-8b", 8192, rank=8, checkpointing="reentrant")),
    "gemma2-lora": (1, Language("gemma2-2b", 2048, rank=8, checkpointing="nonreentrant")),
    "gemma2-lora-eager": (
        1, Language("gemma2-2b", 2048, rank=8, checkpointing="reentrant", attention="eager")),
    "mixtral-full": (2, Language("mixtral-small", 1024)),
    "smollm-full": (16, Language("smollm-135m", 512, optimizer="fused")),
    "llama1b-qlora": (
        2, Language("llama-1b", 2048, weights="nf4", rank=16, checkpointing="nonreentrant",
                    optimizer="paged8")),
    "llama1b-qlora-plain": (2, Language("llama-1b", 512, weights="nf4", rank=16)),
    "llama1b-int8-lora": (
        2, Language("llama-1b", 1024, weights="int8", rank=16, checkpointing="nonreentrant")),
    "llama8b-generate": (4, Language("llama-8b", 512, new_tokens=128)),
    "llama8b-generate-long": (1, Language("llama-8b", 8192, new_tokens=16)),
    "llama1b-generate-static": (
        8, Language("llama-1b", 512, new_tokens=128,
                    generation=(("cache_implementation", "static"), ("disable_compile", True)))),
    "llama1b-generate-beams": (
        2, Language("llama-1b", 512, new_tokens=64, generation=(("num_beams", 4),))),
    "llama1b-nf4-generate": (4, Language("llama-1b", 512, weights="nf4", new_tokens=64)),
}  # fmt: skip

_ADAMW: dict[str, Any] = {"optimizer": "adamw"}

_LANGUAGES = [Case(f"{name}-b{batch}", name, batch) for name, (batch, _) in LANGUAGE.items()]
_OTHERS = [
    Case(f"{name}-b{batch}", name, batch, **options)
    for name, batch, options in (
        ("t5-base", 8, {"precision": "bf16", **_ADAMW}),
        ("t5-base-beams", 4, {}),
        ("whisper-small", 4, {"precision": "fp16", **_ADAMW}),
        ("clip-b32", 32, {"precision": "bf16", "kind": "fused", **_ADAMW}),
        ("segformer-b0", 4, _ADAMW),
        ("detr-r50", 2, _ADAMW),
        ("timm-efficientnet-ema", 32,
         {"precision": "bf16", "channels_last": True, "optimizer": "momentum"}),
        ("timm-vit-ema", 32, {"precision": "bf16", **_ADAMW}),
        ("timm-regnet", 32, {"precision": "fp16", "channels_last": True}),
        ("tv-mask-rcnn", 2, {}),
        ("tv-retinanet", 2, {"precision": "bf16"}),
        ("tv-deeplab", 4, {"precision": "bf16"}),
        ("sd-unet", 2, {"precision": "bf16", **_ADAMW}),
        ("sd-sampling", 2, {}),
        ("dit-l2", 16, {"precision": "bf16", "kind": "fused", **_ADAMW}),
        ("lightning-efficientnet", 16, {}),
        ("pyg-gat", 1, _ADAMW),
    )
]  # fmt: skip

#: In an order that covers much early.
CASES: tuple[Case, ...] = tuple(interleaved(_LANGUAGES, _OTHERS))

#: Models whose cases reserve more than 15 GiB, as simulated on an H100 80GB (at most 33): beside
#: one of them fits what is not among them.
LARGE = frozenset({
    "llama8b-lora", "llama8b-generate", "llama8b-generate-long", "mistral7b-lora",
    "qwen3-06b-full", "qwen05b-trainer-bf16", "llama1b-full-amp", "llama1b-lora-eager",
    "llama1b-full-fused", "llama1b-full-checkpointing", "sd-unet",
})  # fmt: skip
