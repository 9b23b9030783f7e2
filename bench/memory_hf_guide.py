"""Predicted against published: bert-large on a V100, from Hugging Face's single-GPU guide.

"Efficient Training on a Single GPU" of the transformers documentation trains
bert-large-uncased for classification on 512 sequences of 512 tokens with the Trainer, on one
V100 16 GB, and prints what NVML says is occupied (MiB). Its first row, a tensor of one number
on the GPU, is the size of that machine's CUDA context: the one constant taken over. Every
other row is predicted by running the guide's steps on the simulated V100.

The guide was run on 11 January 2022 (its nvidia-smi output; it names no versions, those of
that day are transformers 4.15 and PyTorch 1.10). Four things of then need other memory than
today's, and are done as then:

    attention   written out in BertSelfAttention; softmax kept its input as well as its result
                for backward until PyTorch 1.11 (pytorch issue 49600, pull request 65242)
    AdamW       transformers' own, parameter by parameter ("adamw_hf"); today's is fused
    zero_grad   filled gradients with zeros and kept them (set_to_none since PyTorch 2.0)
    checkpoints reentrant (the only kind until PyTorch 1.11)

"today" in the table is the same script with the defaults of the installed versions. How the
four were found, and which rows were looked at on the way: docs/decisions/0012.

    python bench/memory_hf_guide.py [--quick] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import multiprocessing
import sys
import tempfile
import warnings
from collections.abc import Callable
from typing import Any

from _bench import Figure, finish

GPU = "V100 16GB"
MIB = 1 << 20
#: The guide's first row: the context, and the segment of a tensor with one number.
FIRST_ROW_MIB = 1343
WEIGHTS_MIB = 2631
SEQUENCE, SAMPLES = 512, 512
STEPS = 3
GOAL_PERCENT = 6.0


@dataclasses.dataclass(frozen=True)
class Case:
    """A run of the guide: the arguments of the Trainer that it changes, and what it printed."""

    name: str
    measured_mib: int
    batch: int = 1
    accumulation: int = 4
    arguments: tuple[tuple[str, Any], ...] = ()


CHECKPOINTED = ("gradient_checkpointing", True)
HALF = ("fp16", True)
ADAFACTOR = ("optim", "adafactor")

#: The rows with a goal of their own, and the guide's further ones (8-bit Adam's need
#: bitsandbytes' kernels and are left out).
CASES = (
    Case("batch 4", 14949, batch=4, accumulation=1),
    Case("batch 1, 4 accumulated", 8681),
)
FURTHER_CASES = (
    Case("batch 1, 4 acc., checkpointing", 6775, arguments=(CHECKPOINTED,)),
    Case("batch 4, fp16", 13939, 4, 1, (HALF,)),
    Case("batch 1, 4 acc., chk., fp16", 7275, arguments=(CHECKPOINTED, HALF)),
    Case("batch 4, Adafactor", 12295, 4, 1, (ADAFACTOR,)),
    Case("batch 1, 4 acc., chk., fp16, Adafactor", 4847, arguments=(CHECKPOINTED, HALF, ADAFACTOR)),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One row of the guide with our figures, MiB of device memory."""

    name: str
    measured: int
    predicted: float
    today: float | None = None

    @property
    def error_percent(self) -> float:
        return 100 * (self.predicted - self.measured) / self.measured


def main() -> int:
    """Exit status: 0 if every goal holds, 1 if not, 2 if transformers is absent."""
    options = parse()
    cases = CASES if options.quick else CASES + FURTHER_CASES
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        then = [pool.apply_async(simulate, (case, True)) for case in cases]
        now = [pool.apply_async(simulate, (case, False)) for case in CASES]
        measured = [job.get() for job in then]
        today = [job.get()[1] for job in now]
    rows = [Row("weights on the GPU", WEIGHTS_MIB, measured[0][0])]
    for index, (case, (_, trained)) in enumerate(zip(cases, measured, strict=True)):
        later = today[index] if index < len(today) else None
        rows.append(Row(case.name, case.measured_mib, trained, later))
    if not options.json:
        print_table(rows)
    details = {"rows": [{**dataclasses.asdict(r), "error_percent": r.error_percent} for r in rows]}
    return finish(figures_of(rows), options.json, details)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="without the guide's further rows")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    try:
        import accelerate  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        parser.error(f"{error.name} is needed (pip install transformers accelerate)")
    return options


def figures_of(rows: list[Row]) -> list[Figure]:
    def worst(name: str, some: list[Row]) -> Figure:
        error = max(abs(row.error_percent) for row in some)
        return Figure(f"guide_{name}_error", error, GOAL_PERCENT, True, "%")

    figures = [
        worst("weights", rows[:1]),
        worst("batch_4", rows[1:2]),
        worst("accumulation", rows[2:3]),
    ]
    return figures + ([worst("further_rows_worst", rows[3:])] if rows[3:] else [])


def print_table(rows: list[Row]) -> None:
    print("device memory, MiB (context of the machine: the guide's first row, 1,343)")
    print(f"{'':<42}{'measured':>10}{'predicted':>11}{'error':>8}{'today':>9}")
    for row in rows:
        today = f"{row.today:>9.0f}" if row.today is not None else ""
        print(
            f"{row.name:<42}{row.measured:>10}{row.predicted:>11.0f}"
            f"{row.error_percent:>+7.1f}%{today}"
        )


# One experiment of the guide, in a process of its own ---------------------------------------------


def simulate(case: Case, as_then: bool) -> tuple[float, float]:
    """Device MiB with the weights on the GPU, and after the Trainer's run."""
    from trainfit.hardware import find_gpu
    from trainfit.simgpu.operators.torchvision_operators import define_torchvision_operators
    from trainfit.simgpu.session import Simulation

    define_torchvision_operators()
    import torch

    torch.set_num_threads(1)
    gpu = find_gpu(GPU)
    with Simulation(gpu):
        torch.ones((1, 1)).to("cuda")
        context = FIRST_ROW_MIB * MIB - torch.cuda.memory_reserved()
    gpu = dataclasses.replace(gpu, context_bytes=context)
    with Simulation(gpu), contextlib.redirect_stdout(sys.stderr):
        tensor = torch.ones((1, 1)).to("cuda")
        model = bert_large(as_then).to("cuda")
        weights = torch.cuda.memory_reserved()
        train(case, model, as_then)
        trained = torch.cuda.memory_reserved()
        del tensor
    return (context + weights) / MIB, (context + trained) / MIB


def bert_large(as_then: bool) -> Any:
    """bert-large-uncased without its weights' values, on the CPU as ``from_pretrained`` has it."""
    from transformers import BertConfig, BertForSequenceClassification
    from transformers.initialization import no_init_weights

    class Bert2022(BertForSequenceClassification):
        def zero_grad(self, set_to_none: bool = False) -> None:
            super().zero_grad(set_to_none)

    config = BertConfig(
        vocab_size=30522,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    )
    with no_init_weights():
        if not as_then:
            return BertForSequenceClassification(config)
        register_attention()
        config._attn_implementation = "written_out"
        return Bert2022(config)


def train(case: Case, model: Any, as_then: bool) -> None:
    from transformers import Trainer, TrainingArguments, logging
    from transformers.trainer_callback import PrinterCallback

    logging.set_verbosity_error()
    warnings.simplefilter("ignore", FutureWarning)  # gradient_checkpointing has a new name
    changes = dict(case.arguments)
    if CHECKPOINTED in case.arguments:
        changes["gradient_checkpointing_kwargs"] = {"use_reentrant": as_then}
    own_optimizer = as_then and "optim" not in changes
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=case.batch,
            gradient_accumulation_steps=case.accumulation,
            max_steps=STEPS,
            log_level="error",
            report_to="none",
            # The guide's evaluation every 500 steps never came in its 128.
            eval_strategy="no",
            save_strategy="no",
            disable_tqdm=True,
            **changes,
        )
        trainer = Trainer(
            model=model,
            args=arguments,
            train_dataset=dummy_data(),
            optimizer_cls_and_kwargs=(adamw_of_then(), {"lr": 5e-5}) if own_optimizer else None,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()


def dummy_data() -> Any:
    """The guide's random token ids and labels, as a ``datasets.Dataset`` yields them."""
    import torch

    ids = torch.randint(100, 30000, (SAMPLES, SEQUENCE))
    return [{"input_ids": each, "labels": torch.tensor(0)} for each in ids]


# What was otherwise in January 2022 ---------------------------------------------------------------


def register_attention() -> None:
    """BertSelfAttention of transformers 4.15 under the name "written_out"."""
    import torch
    from torch.nn import functional
    from transformers import AttentionInterface

    softmax = softmax_of_then()

    def attention(
        module: Any, query: Any, key: Any, value: Any, mask: Any, dropout: float = 0.0, **_: Any
    ) -> tuple[Any, Any]:
        scores = torch.matmul(query, key.transpose(-1, -2))
        scores = scores / math.sqrt(query.size(-1))
        # Without a mask one of the parameters' type, for no padding, was made and added.
        batch, _heads, _queries, keys = scores.shape
        scores = scores + torch.zeros(batch, 1, 1, keys, device=scores.device)
        probabilities = functional.dropout(softmax(scores), dropout, module.training)
        return torch.matmul(probabilities, value).transpose(1, 2).contiguous(), None

    AttentionInterface.register("written_out", attention)


def softmax_of_then() -> Callable[[Any], Any]:
    """softmax over the last dimension that keeps input and result, as until PyTorch 1.11.

    ``SoftmaxBackward0`` of PyTorch 1.10 has both ``self_`` and ``result_`` as saved variables
    (torch/csrc/autograd/generated/Functions.h of the wheel); that of 1.11 has ``result_`` alone.
    """
    import torch

    class Softmax(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, scores: Any) -> Any:
            result = torch.softmax(scores, -1)
            ctx.save_for_backward(scores, result)
            return result

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            scores, result = ctx.saved_tensors
            return torch._softmax_backward_data(grad, result, -1, scores.dtype)

    return Softmax.apply


def adamw_of_then() -> Any:
    """AdamW of transformers 4.15: each parameter alone, with one temporary of its size."""
    import torch

    class AdamW(torch.optim.Optimizer):
        def __init__(self, params: Any, lr: float) -> None:
            super().__init__(params, {"lr": lr, "betas": (0.9, 0.999), "eps": 1e-8})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)

        def _update(self, parameter: Any, group: dict[str, Any]) -> None:
            state, grad, (beta1, beta2) = self.state[parameter], parameter.grad, group["betas"]
            if not state:
                state["step"] = 0
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
            state["step"] += 1
            mean, square = state["exp_avg"], state["exp_avg_sq"]
            mean.mul_(beta1).add_(grad, alpha=1 - beta1)
            square.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
            root = square.sqrt().add_(group["eps"])
            bias = math.sqrt(1 - beta2 ** state["step"]) / (1 - beta1 ** state["step"])
            parameter.addcdiv_(mean, root, value=-group["lr"] * bias)

    return AdamW


if __name__ == "__main__":
    sys.exit(main())
