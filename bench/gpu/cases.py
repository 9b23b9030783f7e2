"""The cases of the campaign: what is trained, how, and at which batch size. Data only."""

from __future__ import annotations

import dataclasses
import fnmatch
import importlib.util
from collections.abc import Sequence
from typing import Any, TypeVar

GIB = 1 << 30


@dataclasses.dataclass(frozen=True)
class Case:
    """One training job, or one that only computes.

    ``precision`` is fp32, bf16 or fp16 by autocast, or bf16_weights: all of the model is in it.
    ``mode`` is training, forward (no gradients) or generation (of text). ``optimizer`` is sgd,
    momentum, adam or adamw, ``kind`` its implementation (default, foreach, fused, loop). ``tf32``
    "default" leaves PyTorch's settings: on in cuDNN, off in cuBLAS. ``alloc_conf`` is the value of
    PYTORCH_CUDA_ALLOC_CONF. ``cap_bytes`` limits what the allocator may reserve
    (``set_per_process_memory_fraction``), ``None``: it does not.
    """

    name: str
    model: str
    batch: int
    precision: str = "fp32"
    optimizer: str = "momentum"
    kind: str = "default"
    attention: str = "fused"
    checkpointing: bool = False
    accumulation: int = 1
    clip: bool = False
    channels_last: bool = False
    benchmark: bool = False
    tf32: str = "default"
    set_to_none: bool = True
    alloc_conf: str = ""
    cap_bytes: int | None = None
    steps: int = 3
    mode: str = "training"

    @property
    def job(self) -> str:
        """The name without the batch size."""
        return self.name.removesuffix(f"-b{self.batch}")

    def at(self, batch: int) -> Case:
        """The same job with another batch size, and a name that says so."""
        return dataclasses.replace(self, name=f"{self.name}-b{batch}", batch=batch)


def case(model: str, batch: int, *words: str, **options: Any) -> Case:
    """A case named after what differs from the defaults; ``words`` go into the name."""
    name = "-".join((model, options.get("precision", "fp32"), *words, f"b{batch}"))
    return Case(name=name.replace("_", "-"), model=model, batch=batch, **options)


def _vision() -> list[Case]:
    bf16, fp16 = {"precision": "bf16"}, {"precision": "fp16"}
    adamw = {"optimizer": "adamw"}
    cases = [case("resnet50", b) for b in (8, 32, 128)]
    cases += [case("resnet50", b, **bf16) for b in (32, 128)]
    cases += [
        case("resnet50", 32, **fp16),
        case("resnet50", 32, "tf32-off", tf32="off"),
        case("resnet50", 32, "tf32-on", tf32="on"),
        case("resnet50", 32, "benchmark", benchmark=True),
        case("resnet50", 32, "benchmark", benchmark=True, **bf16),
        case("resnet50", 32, "nhwc", channels_last=True),
        case("resnet50", 32, "nhwc", channels_last=True, **bf16),
        case("resnet50", 32, "nhwc-benchmark", channels_last=True, benchmark=True, **bf16),
        case("resnet50", 32, "checkpointing", checkpointing=True),
        case("resnet50", 16, "accumulation", accumulation=4),
        case("resnet50", 16, "keep-gradients", set_to_none=False),
        case("resnet50", 32, "sgd", optimizer="sgd"),
        case("resnet50", 32, "adam", optimizer="adam"),
        case("resnet50", 32, "adamw-loop", kind="loop", **adamw),
        case("resnet50", 32, "adamw-fused", kind="fused", **adamw),
        case("resnet50", 32, "expandable", alloc_conf="expandable_segments:True"),
        case("resnet50", 32, "roundup", alloc_conf="roundup_power2_divisions:4"),
        case("resnet50", 32, "split64", alloc_conf="max_split_size_mb:64"),
    ]
    cases += [case("resnet18", b, "sgd", optimizer="sgd") for b in (16, 64, 256)]
    cases += [case("vgg16", b, "adam", optimizer="adam") for b in (16, 32, 64)]
    cases += [
        case("vgg16", 32, "tf32-off", tf32="off"),
        case("vgg16", 32, "benchmark", benchmark=True),
        case("vgg16", 32, "adam", optimizer="adam", **bf16),
        case("tv_vgg16", 32, "adam", optimizer="adam"),
    ]
    cases += [case("convnext_tiny", b, "adamw", **adamw) for b in (8, 32)]
    cases += [
        case("convnext_tiny", 32, "adamw", **adamw, **bf16),
        case("convnext_tiny", 32, "nhwc", channels_last=True, **bf16),
        case("timm_convnext_tiny", 32, "adamw", **adamw),
        case("timm_efficientnet_b0", 32, **bf16),
        case("timm_efficientnet_b0", 32),
        case("tv_mobilenet_v3", 64),
    ]
    cases += [case("unet", b, "adam", optimizer="adam") for b in (2, 8)]
    cases += [
        case("unet", 8, "adam", optimizer="adam", **bf16),
        case("unet", 8, "nhwc", channels_last=True, **bf16),
        case("ssd", 8),
        case("ssd", 32, **fp16),
        case("tv_faster_rcnn", 2, "sgd", optimizer="momentum"),
    ]
    return cases


def _sequences() -> list[Case]:
    bf16, fp16 = {"precision": "bf16"}, {"precision": "fp16"}
    adamw = {"optimizer": "adamw"}
    cases = [case("vit_b16", b, "adamw", **adamw) for b in (8, 32)]
    cases += [
        case("vit_b16", 32, "adamw", **adamw, **bf16),
        case("vit_b16", 128, "adamw-fused", kind="fused", **adamw, **bf16),
        case("vit_b16", 32, "written-out", attention="written out", **adamw),
        case("vit_b16", 32, "written-out", attention="written out", **adamw, **bf16),
        case("vit_b16", 32, "checkpointing", checkpointing=True, **adamw, **bf16),
        case("vit_b16", 16, "accumulation", accumulation=4, **adamw, **bf16),
        case("timm_vit_b16", 32, "adamw", **adamw, **bf16),
        case("vit_s16", 64, "tf32-on", tf32="on", **adamw),
        case("tv_swin_t", 16, "adamw", **adamw),
        case("tv_swin_t", 32, "adamw", **adamw, **bf16),
        case("gpt2", 2, "adamw", **adamw),
        case("gpt2", 4, "adamw", **adamw, **bf16),
        case("gpt2", 8, "adamw-fused", kind="fused", **adamw, **bf16),
        case("gpt2", 4, "checkpointing", checkpointing=True, **adamw, **bf16),
        case("gpt2", 2, "written-out", attention="written out", **adamw, **fp16),
        case("gpt2", 4, "expandable", alloc_conf="expandable_segments:True", **adamw, **bf16),
        case("hf_gpt2", 2, "adamw", **adamw, **bf16),
        case("bert_base", 4, "adamw", **adamw),
        case("bert_base", 16, "adamw", **adamw, **bf16),
        case("bert_base", 8, "clip", clip=True, **adamw, **fp16),
        case("hf_bert_large", 4, "adamw", **adamw),
        case("hf_bert_large", 1, "accumulation", accumulation=4, **adamw),
        case("lstm", 32, "adam", optimizer="adam"),
        case("lstm", 128, "adam", optimizer="adam"),
        case("lstm", 128, "adam", optimizer="adam", **bf16),
        case("gru", 64, "adam", optimizer="adam"),
        case("act", 4, "adamw", clip=True, **adamw),
        case("act", 8, "adamw", clip=True, **adamw, **bf16),
        case("act", 8, "benchmark", clip=True, benchmark=True, **adamw, **bf16),
        case("act_lerobot", 8, "adamw", clip=True, **adamw, **bf16),
    ]
    for optimizer in ("sgd", "momentum", "adam", "adamw"):
        for kind in ("foreach", "fused", "loop"):
            words = {"optimizer": optimizer, "kind": kind}
            cases.append(case("mlp", 256, optimizer, kind, **words))
    return cases


def _capped() -> list[Case]:
    """Jobs whose largest batch under a limit is predicted, run, and exceeded by one.

    The batch is where the prediction begins to measure.
    """
    adamw = {"optimizer": "adamw"}
    bf16 = {"precision": "bf16"}
    expandable = {"alloc_conf": "expandable_segments:True"}

    def capped(model: str, gib: int, *words: str, **options: Any) -> Case:
        made = case(model, 4, *words, **options, cap_bytes=gib * GIB)
        return dataclasses.replace(made, name=f"cap{gib}-{made.job}")

    return [
        capped("resnet50", 6),
        capped("resnet50", 6, **bf16),
        capped("resnet18", 3, "expandable", **expandable),
        capped("vit_b16", 6, "adamw", **adamw, **bf16),
        capped("gpt2", 8, "adamw", **adamw, **bf16),
        capped("gpt2", 8, "expandable", **adamw, **bf16, **expandable),
        capped("unet", 6, "adam", optimizer="adam"),
        capped("act", 8, "adamw", clip=True, **adamw, **bf16),
        capped("lstm", 2, "adam", optimizer="adam"),
    ]


@dataclasses.dataclass(frozen=True)
class TimedCase:
    """A job whose steps are timed at several batch sizes, in one process."""

    case: Case
    batches: tuple[int, ...]

    @property
    def name(self) -> str:
        return f"steps-{self.case.job}"


def timed_cases() -> list[TimedCase]:
    """The models of which step times are asked: five in bf16 and float32, and others as they are
    usually run."""
    adamw = {"optimizer": "adamw"}
    jobs: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
        ("act", (2, 4, 8, 16, 32), {"clip": True, **adamw}),
        ("resnet50", (8, 16, 32, 64, 128), {}),
        ("vit_b16", (8, 16, 32, 64, 128), adamw),
        ("bert_base", (4, 8, 16, 32, 64), adamw),
        ("gpt2", (1, 2, 4, 8, 16), adamw),
    ]
    cases = [
        TimedCase(case(model, batches[0], precision=precision, **options), batches)
        for precision in ("bf16", "fp32")
        for model, batches, options in jobs
    ]
    return cases + [TimedCase(each, (each.batch, *more)) for each, *more in _other_timed()]


def _other_timed() -> list[tuple[Any, ...]]:
    """A case, and batch sizes after its own."""
    adam, adamw = {"optimizer": "adam"}, {"optimizer": "adamw"}
    bf16, whole = {"precision": "bf16"}, {"precision": "bf16_weights"}
    last = {"channels_last": True, **bf16}
    forward, text = {"mode": "forward"}, {"mode": "generation"}
    return [
        (case("hf_llama_1k", 1, "adamw", **adamw, **whole), 4),
        (case("hf_llama_4k", 1, "checkpointing", checkpointing=True, **adamw, **whole), 2),
        (case("peft_llama_1k", 1, "adamw", **adamw, **whole), 4),
        (case("timm_convnext_tiny", 16, "nhwc", **adamw, **last), 128),
        (case("timm_efficientnet_b0", 16, "nhwc", **adamw, **last), 128),
        (case("timm_swin_tiny", 16, "nhwc", **adamw, **last), 64),
        (case("unet", 4, "nhwc", **adam, **last), 16),
        (case("hf_gpt2", 2, "dropout", **adamw, **bf16), 8),
        (case("resnet50", 32, "nhwc", **last), 128),
        (case("lstm", 32, "adam", **adam), 256),
        (case("hf_llama_1k", 1, "prefill", **forward, **whole), 8),
        (case("hf_llama_text", 1, "decode", **text, **whole), 16),
        (case("act", 1, "forward", **forward), 8),
        (case("resnet50", 1, "forward", **forward, **bf16), 64),
        (case("vit_b16", 1, "forward", **forward, **bf16), 64),
        (case("hf_bert_large", 4, "adamw", **adamw), 16),
        (case("convnext_tiny", 16, "adamw", **adamw, **bf16), 64),
        (case("gru", 64, "adam", **adam, **bf16), 512),
        (case("gpt2", 4, "fused", kind="fused", **adamw, **bf16), 16),
        (case("vit_b16", 16, "written-out", attention="written out", **adamw, **bf16), 64),
    ]


#: What a look (--quick) takes: one of each kind.
QUICK = (
    "steps-act-bf16", "steps-resnet50-bf16",
    "resnet18-fp32-sgd-b16", "resnet50-bf16-b32", "vit-b16-bf16-adamw-b32", "gpt2-bf16-adamw-b4",
    "lstm-fp32-adam-b32", "mlp-fp32-adamw-fused-b256", "gpt2-bf16-expandable-b4",
    "cap3-resnet18-fp32-expandable",
)  # fmt: skip


def all_cases() -> list[Case]:
    """Every case; plain ones in an order that covers much early, capped ones last."""
    plain = interleaved(_vision(), _sequences())
    cases = plain + _capped()
    names = [each.name for each in cases]
    assert len(set(names)) == len(names), sorted(n for n in names if names.count(n) > 1)
    return cases


def chosen(only: list[str], quick: bool = False) -> list[Case]:
    """Cases whose names match one of the patterns (``*`` and ``?``, or a part of the name)."""
    return matching(all_cases(), only, quick)


def chosen_timed(only: list[str], quick: bool = False) -> list[TimedCase]:
    """The same of jobs whose steps are timed."""
    return matching(timed_cases(), only, quick)


_Named = TypeVar("_Named", Case, TimedCase)


def matching(found: Sequence[_Named], only: list[str], quick: bool = False) -> list[_Named]:
    """Those whose names match one of the patterns, or all where there is none."""
    found = [each for each in found if not quick or each.name in QUICK]
    patterns = [word if set("*?[") & set(word) else f"*{word}*" for word in only or ["*"]]
    return [each for each in found if any(fnmatch.fnmatch(each.name, p) for p in patterns)]


def missing(packages: tuple[str, ...]) -> str | None:
    """The first of ``packages`` that is not installed."""
    return next((name for name in packages if importlib.util.find_spec(name) is None), None)


def interleaved(one: list[Case], two: list[Case]) -> list[Case]:
    """A stride through both lists, so that a stopped campaign has some of everything."""
    both = [each for pair in zip(one, two, strict=False) for each in pair]
    both += one[len(two) :] + two[len(one) :]
    stride = 7
    return [both[i] for start in range(stride) for i in range(start, len(both), stride)]
