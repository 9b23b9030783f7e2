"""Text: language models, embeddings, preference learning."""

from corpus.family import PLAIN_SGD, Family, HandSum

#: Words in and out, four blocks (two of four heads are keys' and values'), the last norm.
LLAMA = 2 * 2000 * 128 + 4 * (3 * 128 * 128 + 3 * 128 * 352 + 2 * 128) + 128

FAMILIES = (
    Family(
        name="word-lstm",
        about="word-level LSTM with tied weights, truncated backpropagation, SGD, no DataLoader",
        packages=("torch",),
        command="python {scripts}/word_lstm.py --batch-size={batch}",
        starts=(20, 40),
        hand=HandSum(
            parameters=2000 * 200 + 2000 + 2 * 4 * 200 * (200 + 200 + 2), state_bytes=PLAIN_SGD
        ),
    ),
    Family(
        name="nanogpt-style",
        about="GPT on a memory-mapped file, 5 micro-steps in bfloat16, fused AdamW",
        packages=("torch",),
        command="python {scripts}/nano_gpt.py --batch-size={batch} --accumulate=5",
        starts=(12, 24),
        hand=HandSum(
            parameters=(4096 + 128) * 256 + 4 * (12 * 256**2 + 13 * 256) + 2 * 256,
            accumulation=5,
        ),
    ),
    Family(
        name="trl-sft",
        about="console script trl sft: a small Llama from a folder, texts of varying length",
        packages=("trl", "transformers"),
        prepare="python {scripts}/llama_data.py {data}",
        command="trl sft --model_name_or_path {data}/model --dataset_name {data}/texts "
        "--output_dir sft --per_device_train_batch_size {batch} "
        "--gradient_accumulation_steps 2 --report_to none --max_length 128",
        cpu_command="trl sft --model_name_or_path {data}/model --dataset_name {data}/texts "
        "--output_dir sft --per_device_train_batch_size {batch} "
        "--gradient_accumulation_steps 2 --report_to none --max_length 128 --use_cpu true "
        "--bf16 false",
        starts=(4, 16),
        hand=HandSum(parameters=LLAMA, accumulation=2, samples=512),
    ),
    Family(
        name="trl-dpo",
        about="console script trl dpo: preferences, the reference model next to the trained one",
        packages=("trl", "transformers"),
        prepare="python {scripts}/llama_data.py {data}",
        command="trl dpo --model_name_or_path {data}/model --dataset_name {data}/pairs "
        "--output_dir dpo --per_device_train_batch_size {batch} --report_to none",
        cpu_command="trl dpo --model_name_or_path {data}/model --dataset_name {data}/pairs "
        "--output_dir dpo --per_device_train_batch_size {batch} --report_to none "
        "--use_cpu true --bf16 false",
        starts=(4, 8),
        hand=HandSum(parameters=2 * LLAMA, trained=LLAMA, samples=256),
    ),
    Family(
        name="trl-grpo",
        about="GRPOTrainer: answers are generated, rewarded and learned from",
        packages=("trl", "transformers"),
        prepare="python {scripts}/llama_data.py {data}",
        command="python {scripts}/trl_grpo.py {data} --batch-size={batch}",
        starts=(8, 16),
        # Each of 128 prompts is answered 4 times.
        hand=HandSum(parameters=LLAMA, samples=512),
    ),
    Family(
        name="peft-lora",
        about="LoRA of rank 8 on a small Qwen2, in a plain loop",
        packages=("peft", "transformers"),
        command="python {scripts}/peft_lora.py --batch-size={batch}",
        starts=(4, 16),
        hand=HandSum(parameters=2_798_784, idle=2_798_784 - 21_504, samples=800),
    ),
    Family(
        name="sentence-transformers",
        about="pairs of texts of varying length, MultipleNegativesRankingLoss",
        packages=("sentence-transformers",),
        command="python {scripts}/sentence_pairs.py --batch-size={batch}",
        starts=(16, 64),
        hand=HandSum(parameters=1_061_376, idle=129 * 128, samples=1024),
    ),
    Family(
        name="x-transformers",
        about="decoder with rotary positions and gated feed-forwards",
        packages=("x-transformers",),
        command="python {scripts}/x_decoder.py --batch-size={batch}",
        starts=(8, 32),
        hand=HandSum(parameters=3_285_504, samples=1024),
    ),
    Family(
        name="bitsandbytes",
        about="AdamW8bit on PyTorch's own transformer encoder",
        packages=("bitsandbytes",),
        command="python {scripts}/eight_bit.py --batch-size={batch}",
        starts=(8, 32),
        hand=HandSum(
            # Two bytes a parameter and, for 256 of them, two scales; biases and norms stay float32.
            parameters=2_000 * 256 + 1000 + 3 * (12 * 256**2 + 13 * 256),
            state_bytes=2 + 8 / 256,
            samples=1024,
        ),
        tolerance=0.02,
    ),
    Family(
        name="transformers-generate",
        about="inference: generate() with a small GPT-2",
        packages=("transformers",),
        command="python {scripts}/generate.py --batch-size={batch}",
        inference=True,
        starts=(4, 16),
        hand=HandSum(parameters=(3000 + 128) * 192 + 4 * (12 * 192**2 + 13 * 192) + 2 * 192),
    ),
)
