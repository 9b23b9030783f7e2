"""What large language models are trained and served with, on small ones: scripts of Transformers,
TRL, LLaMA-Factory, LitGPT, torchtune, adapters and weights of 4 bits, speech, images, other kinds
of layers, texts by beams and with an assistant.

The scripts of Transformers' repository are no part of its package: ``TRAINFIT_EXAMPLES`` names its
``examples/pytorch``. LLaMA-Factory, LitGPT and torchtune need older versions of the others
(``requirements/real-llm.txt``). Families without what they need are skipped. Each is simulated
once, as plans at other batch sizes do not depend on the kind of model.
"""

import dataclasses

from corpus.families.language import LLAMA
from corpus.family import Family, HandSum

#: The projections of the small Llama's four layers: what 4 bits replace, and adapters go to.
LINEAR = 4 * (3 * 128 * 128 + 3 * 128 * 352)
#: Adapters of rank 8 on all of them; on queries, values, outputs and the feed-forward; on queries
#: and values, made together.
LORA = 4 * 8 * (2 * (128 + 128) + 2 * (128 + 64) + 3 * (128 + 352))
LORA_TORCHTUNE = 4 * 8 * (2 * (128 + 128) + (128 + 64) + 3 * (128 + 352))
LORA_LITGPT = 4 * 8 * (2 * 128 + 128 + 64)
#: Two values of 4 bits are an element of bytes; 64 of them share a scale, and each of 28 layers has
#: a table of its 16 values; adapters of such weights are in bfloat16.
PACKED = LLAMA - LINEAR + LINEAR // 2
_QUANTIZED = 4 * (LLAMA - LINEAR) + LINEAR // 2 + 4 * LINEAR // 64 + 28 * 16 * 4 + 2 * LORA
QLORA = HandSum(
    parameters=PACKED + LORA,
    trained=LORA,
    weight_bytes=_QUANTIZED / (PACKED + LORA),
    gradient_bytes=2,
)
#: A sum of bytes over elements is no whole number.
_ROUNDED = 1e-6
#: Adapters of fewer than 4,096 elements have states in float32, by bitsandbytes; on the CPU they
#: are trained by PyTorch's AdamW, whose states are of their type.
_NOT_PAGED = {"bare: state bytes": "another optimizer"}
#: Words, positions, types and their norm; two layers; the pooler and two classes.
BERT = (
    (2000 + 512 + 2 + 2) * 128
    + 2 * (4 * (128**2 + 128) + 2 * 128 * 512 + 512 + 128 + 4 * 128)
    + 128**2 + 128 + 2 * (128 + 1)
)  # fmt: skip
#: Shared words; encoder and decoder of two layers, with one table of relative positions each.
_T5_ATTENTION, _T5_FEED = 4 * 128**2 + 128, 2 * 128 * 256 + 128
T5 = 2000 * 128 + 2 * (3 * _T5_ATTENTION + 2 * _T5_FEED) + 2 * (32 * 4 + 128)
#: Positions of the encoder, which are not trained; convolutions; two layers each, the decoder's
#: with attention to the encoder; words and positions of the decoder.
_SINES = 300 * 128
_W_ATTENTION, _W_FEED = 4 * 128**2 + 3 * 128 + 256, 2 * 128 * 256 + 256 + 128 + 256
WHISPER = (
    (80 + 128) * 3 * 128 + 2 * 128 + _SINES
    + 2 * (_W_ATTENTION + _W_FEED) + 256
    + (2000 + 448) * 128 + 2 * (2 * _W_ATTENTION + _W_FEED) + 256
)  # fmt: skip
#: Patches and their positions, two layers, a norm; four patches become a token.
SMOLVLM = (
    LLAMA
    + 3 * 16**2 * 64 + 64 + 16 * 64
    + 2 * (4 * (64**2 + 64) + 2 * 64 * 256 + 256 + 64 + 4 * 64) + 2 * 64
    + 4 * 64 * 128
)  # fmt: skip
MIXTRAL = 2 * 2000 * 128 + 2 * (3 * 128**2 + 4 * 3 * 128 * 256 + 4 * 128 + 2 * 128) + 128
MAMBA = (
    2000 * 128 + 128
    + 2 * (128 * 512 + 5 * 256 + 256 * (8 + 32) + 9 * 256 + 17 * 256 + 256 * 128 + 128)
)  # fmt: skip

_DATA = "python {scripts}/large_model_data.py {data} "
_SCRIPT = "python {scripts}/large_model.py {data} "
_ON_CPU = " --use_cpu true --bf16 false"
_CLM = (
    "python {examples}/language-modeling/run_clm.py --model_name_or_path {data}/model "
    "--train_file {data}/train.txt --validation_file {data}/eval.txt --do_train --do_eval "
    "--block_size 64 --per_device_train_batch_size {batch} --output_dir out --report_to none"
)
_GLUE = (
    "python {examples}/text-classification/run_glue.py --model_name_or_path {data}/small "
    "--train_file {data}/train.csv --validation_file {data}/eval.csv --do_train --do_eval "
    "--max_seq_length 64 --per_device_train_batch_size {batch} --output_dir out --report_to none"
)
_SUMMARIES = (
    "python {examples}/summarization/run_summarization.py --model_name_or_path {data}/small "
    "--train_file {data}/train.csv --validation_file {data}/eval.csv --text_column text "
    "--summary_column summary --do_train --do_eval --predict_with_generate "
    "--max_source_length 128 --max_target_length 32 --per_device_train_batch_size {batch} "
    "--output_dir out --report_to none"
)
_SFT = (
    "trl sft --model_name_or_path {data}/model --dataset_name {data}/texts --output_dir out "
    "--per_device_train_batch_size {batch} --report_to none --max_length 128 --use_peft "
    "--lora_r 8 --lora_target_modules all-linear"
)
_DPO = (
    "trl dpo --model_name_or_path {data}/model --dataset_name {data}/pairs --output_dir out "
    "--per_device_train_batch_size {batch} --report_to none --use_peft --lora_r 8 "
    "--lora_target_modules all-linear"
)
_FACTORY = (
    "llamafactory-cli train --stage sft --do_train --model_name_or_path {data}/model "
    "--dataset alpaca --dataset_dir {data} --template empty --cutoff_len 128 "
    "--finetuning_type lora --lora_rank 8 --lora_target all --output_dir out --report_to none "
    "--preprocessing_num_workers 1 --per_device_train_batch_size {batch}"
)
_LITGPT = (
    "litgpt finetune_lora {data}/litgpt --data JSON --data.json_path {data}/train.json "
    "--data.val_split_fraction 0.1 --train.global_batch_size 16 --train.epochs 1 "
    "--train.micro_batch_size {batch} --out_dir out"
)
_TORCHTUNE = "tune run lora_finetune_single_device --config {data}/lora.yaml batch_size={batch}"


def _one(kind: str, about: str, hand: HandSum, *packages: str, data: str = "", **more) -> Family:
    """A family of the one driver, ``large_model.py``."""
    return Family(
        name=f"llm-{kind}",
        about=about,
        packages=(*packages, "transformers"),
        prepare=_DATA + (data or "none"),
        command=_SCRIPT + kind + " --batch-size={batch}",
        hand=hand,
        **{"starts": (4, 4), **more},
    )


_ALL = (
    Family(
        name="llm-run-clm",
        starts=(8, 8),
        about="run_clm.py of Transformers: texts cut into blocks, an evaluation",
        packages=("transformers", "datasets", "evaluate"),
        prepare=_DATA + "clm",
        command=_CLM,
        cpu_command=_CLM + " --use_cpu true",
        hand=HandSum(parameters=LLAMA),
    ),
    Family(
        name="llm-run-glue",
        starts=(8, 8),
        about="run_glue.py of Transformers: a small BERT classifies lines of a CSV file",
        packages=("transformers", "datasets", "evaluate"),
        prepare=_DATA + "glue",
        command=_GLUE,
        cpu_command=_GLUE + " --use_cpu true",
        hand=HandSum(parameters=BERT),
    ),
    Family(
        name="llm-run-summarization",
        starts=(8, 8),
        about="run_summarization.py of Transformers: T5; its evaluation generates texts",
        packages=("transformers", "datasets", "evaluate", "rouge-score", "nltk"),
        prepare=_DATA + "summarization",
        command=_SUMMARIES,
        cpu_command=_SUMMARIES + " --use_cpu true",
        hand=HandSum(parameters=T5),
    ),
    Family(
        name="llm-sft-lora",
        about="trl sft --use_peft: LoRA of rank 8 on all linear layers",
        packages=("trl", "peft", "transformers"),
        prepare=_DATA + "none",
        command=_SFT,
        cpu_command=_SFT + _ON_CPU,
        starts=(4, 4),
        hand=HandSum(parameters=LLAMA + LORA, trained=LORA),
    ),
    Family(
        name="llm-sft-qlora",
        about="trl sft --load_in_4bit --use_peft with a paged optimizer of 8 bits",
        packages=("trl", "peft", "bitsandbytes", "transformers"),
        prepare=_DATA + "none",
        command=_SFT + " --load_in_4bit --optim paged_adamw_8bit",
        cpu_command=_SFT + " --load_in_4bit" + _ON_CPU,
        starts=(4, 4),
        hand=QLORA,
        tolerance=_ROUNDED,
        left_out=_NOT_PAGED,
    ),
    Family(
        name="llm-dpo-lora",
        about="trl dpo --use_peft: the reference is the model without its adapters",
        packages=("trl", "peft", "transformers"),
        prepare=_DATA + "none",
        command=_DPO,
        cpu_command=_DPO + _ON_CPU,
        starts=(4, 4),
        hand=HandSum(parameters=LLAMA + LORA, trained=LORA),
    ),
    _one(
        "dpo-qlora",
        "DPOTrainer on weights of 4 bits, adapters, a paged optimizer",
        QLORA,
        "trl",
        "peft",
        "bitsandbytes",
        tolerance=_ROUNDED,
        left_out=_NOT_PAGED,
    ),
    _one(
        "grpo-lora",
        "GRPOTrainer with adapters: 64 tokens an answer are generated in each step",
        HandSum(parameters=LLAMA + LORA, trained=LORA),
        "trl",
        "peft",
        said=("text of 64 tokens, made before the training or by it, 3 calls",),
        starts=(8, 8),
    ),
    Family(
        name="llm-llamafactory",
        about="llamafactory-cli train: LoRA on a small Llama in bfloat16",
        packages=("llamafactory",),
        prepare=_DATA + "alpaca",
        command=_FACTORY + " --bf16",
        cpu_command=_FACTORY,
        starts=(4, 4),
        hand=HandSum(parameters=LLAMA + LORA, trained=LORA),
    ),
    Family(
        name="llm-litgpt",
        about="litgpt finetune_lora: queries and values, 16 samples a step in micro-batches",
        packages=("litgpt",),
        prepare=_DATA + "litgpt",
        command=_LITGPT + " --precision bf16-true",
        cpu_command=_LITGPT + " --precision bf16-true",
        starts=(4, 4),
        hand=HandSum(
            parameters=LLAMA + LORA_LITGPT,
            idle=LLAMA,  # its optimizer is given all of them
            weight_bytes=2,
            gradient_bytes=2,
            state_bytes=4,
            effective=16,
        ),
    ),
    Family(
        name="llm-torchtune",
        about="torchtune's recipe of LoRA on one GPU, by a configuration file, in bfloat16",
        packages=("torchtune",),
        prepare=_DATA + "torchtune",
        command=_TORCHTUNE,
        cpu_command=_TORCHTUNE + " device=cpu",
        starts=(4, 4),
        hand=HandSum(
            parameters=LLAMA + LORA_TORCHTUNE,
            idle=LLAMA,  # its optimizer is given all of them
            weight_bytes=2,
            gradient_bytes=2,
            state_bytes=4,
            accumulation=2,
        ),
    ),
    _one(
        "liger",
        "Trainer with use_liger_kernel: norms, rotary positions and cross-entropy in Triton",
        HandSum(parameters=LLAMA),
        "liger-kernel",
    ),
    _one("mixtral", "four experts, two of them a token", HandSum(parameters=MIXTRAL)),
    _one("mamba", "state-space layers", HandSum(parameters=MAMBA)),
    _one(
        "whisper",
        "Seq2SeqTrainer on spectrograms; positions of the encoder are not trained",
        HandSum(parameters=WHISPER, trained=WHISPER - _SINES),
    ),
    _one("smolvlm", "images and texts, a small SmolVLM", HandSum(parameters=SMOLVLM)),
    Family(
        name="llm-fsdp",
        about="fully_shard (FSDP2) with one process, by torch.distributed.run",
        packages=("transformers",),
        prepare=_DATA + "none",
        command="python -m torch.distributed.run --nproc-per-node=1 {scripts}/large_model.py "
        "{data} fsdp --batch-size={batch}",
        starts=(4, 4),
        hand=HandSum(parameters=LLAMA),
    ),
    _one(
        "beams",
        "inference: T5 generates 200 tokens with four beams",
        # Four rows of keys and values in two layers: of 200 words (the last is in no call), and of
        # 100 of the source.
        HandSum(parameters=T5, cache_bytes=4 * 2 * 2 * 128 * 4 * (200 + 100)),
        kinds=("kv_cache",),
        inference=True,
    ),
    _one(
        "assisted",
        "inference: a small model proposes tokens, a larger one decides",
        HandSum(parameters=LLAMA + LLAMA - 3 * (LLAMA - 2 * 2000 * 128 - 128) // 4),
        inference=True,
        placeholder=False,
        starts=(1, 1),
    ),
)

FAMILIES = tuple(dataclasses.replace(each, simulates=True) for each in _ALL)
