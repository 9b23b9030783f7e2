"""What the packages around language models say, in their words, and what to do then."""

from __future__ import annotations

import pytest

from trainfit.findings.facts import FailureContext
from trainfit.findings.failure import KINDS, of_exception
from trainfit.results.findings import Finding

EXPANDED = (
    "RuntimeError: The expanded size of the tensor (1024) must match the existing size (512) at "
    "non-singleton dimension 1.  Target sizes: [4, 1024].  Tensor sizes: [1, 512]"
)


def cause(error: str, line: str = "raise", **seen: int) -> Finding | None:
    """Of an error that Transformers raises at a line of its own."""
    library = "/env/lib/python3.11/site-packages/transformers/models/bert/modeling_bert.py"
    text = (
        "Traceback (most recent call last):\n"
        '  File "train.py", line 3, in <module>\n    model(**batch)\n'
        f'  File "{library}", line 94, in forward\n    {line}\n{error}\n'
    )
    return of_exception(text, seen=FailureContext(**seen))


@pytest.mark.parametrize(
    ("error", "kind", "fix"),
    [
        (
            "ValueError: Cannot handle batch sizes > 1 if no padding token is defined.",
            "classifier_padding",
            "model.config.pad_token_id",
        ),
        (
            "OSError: Repo id must use alphanumeric chars, '-', '_' or '.': './my-llama'.",
            "no_model_folder",
            "config.json",
        ),
        (
            "ValueError: Input length of input_ids is 64, but `max_length` is set to 20. This can",
            "no_room_for_tokens",
            "max_new_tokens=",
        ),
        (
            "ValueError: The following `model_kwargs` are not used by the model: ['token']",
            "unused_inputs",
            "return_token_type_ids=False",
        ),
        (
            "ImportError: Loading a GPTQ quantized model requires optimum (`pip install optimum`)",
            "package_missing",
            "pip install optimum,",
        ),
        (
            "ImportError: A valid HQQ version (>=0.2.1) is not available. Please follow the …",
            "package_missing",
            "pip install 'hqq>=0.2.1',",
        ),
        (
            "ImportError: Loading an FP8 fbgemm quantized model on CUDA requires fbgemm-gpu "
            "libraryPlease install the latest version",
            "package_missing",
            "pip install fbgemm-gpu,",
        ),
        ("ImportError: Requires mslk >= 1.0.0", "package_missing", "pip install 'mslk>=1.0.0',"),
        (
            "ImportError: Using `bitsandbytes` quantization requires x: `pip install -U x>=1`",
            "package_missing",
            "pip install -U 'x>=1',",
        ),
        (
            "ValueError: Please correct the following DeepSpeed config values that mismatch "
            "TrainingArguments values:\n- ds bf16.enabled=True vs hf bf16|bf16_full_eval=False",
            "deepspeed_disagrees",
            "bf16=True of TrainingArguments",
        ),
        (
            "RuntimeError: GPU is required to quantize or run quantize model.",
            "quantizer_refuses",
            "--gpu",
        ),
        (
            "ValueError: FP8 quantized models is only supported on GPUs with compute capability "
            ">= 8.9 (e.g 4090/H100), actual = `8.6`",
            "quantizer_refuses",
            "--gpu",
        ),
        (
            "ValueError: Some modules are dispatched on the CPU or the disk. Make sure you have",
            "quantized_offload",
            "llm_int8_enable_fp32_cpu_offload",
        ),
        (
            "ValueError: `.to` is not supported for `4-bit` or `8-bit` bitsandbytes models.",
            "quantized_device",
            'device_map={"": 0}',
        ),
        (
            "ValueError: The checkpoint you are trying to load has model type `qwen9` but "
            "Transformers does not recognize this architecture.",
            "unknown_model",
            "--upgrade transformers",
        ),
        (
            "ValueError: Unrecognized configuration class <class 'transformers.T5Config'> for this "
            "kind of AutoModel: AutoModelForCausalLM.\nModel type should be one of",
            "other_head",
            "AutoModelForSeq2SeqLM",
        ),
        (
            "ValueError: Cannot use chat template functions because tokenizer.chat_template is not "
            "set and no template argument was passed!",
            "no_chat_template",
            "instruct",
        ),
        (
            "ValueError: Target modules {'q', 'v'} not found in the base model. Please check the",
            "adapter_targets",
            '"all-linear"',
        ),
        (
            "ValueError: generation_batch_size (3) must be divisible by num_generations (8).",
            "generations",
            "gradient_accumulation_steps",
        ),
    ],
)
def test_a_packages_words(error: str, kind: str, fix: str) -> None:
    found = cause(error)
    assert found is not None and found.kind == kind and kind in KINDS
    assert fix in found.fixes[0].action


@pytest.mark.parametrize(
    ("error", "line", "seen"),
    [
        (EXPANDED, "token_type_ids = buffered_token_type_ids.expand(batch_size, seq_length)", {}),
        (
            "RuntimeError: The size of tensor a (1024) must match the size of tensor b (512) at "
            "non-singleton dimension 1",
            "embeddings = input_embeds + position_embeddings",
            {},
        ),
        (
            "IndexError: index out of range in self",
            "self.wpe(ids)",
            {"tokens": 1024, "positions": 512},
        ),
    ],
)
def test_a_text_that_is_too_long(error: str, line: str, seen: dict[str, int]) -> None:
    found = cause(error, line, **seen)
    assert found is not None and found.kind == "context_too_long" and found.kind in KINDS
    assert "1,024 tokens" in found.title and "512 positions" in found.title
    assert "max_length=512" in found.fixes[0].action


def test_other_sizes_and_indices_are_no_long_text() -> None:
    wide = cause(EXPANDED, "x.expand(4, 1024)")
    assert wide is not None and wide.kind == "expand_size"
    found = cause("IndexError: index out of range in self", "", tokens=100, positions=512)
    assert found is not None and found.kind == "index_out_of_range"
