"""A small Llama and its tokenizer in a folder, and texts or preferences as JSON lines."""

import json
import random
import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from words import tokenizer

folder = Path(sys.argv[1])
torch.manual_seed(0)
random.seed(0)
words = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer(2000),
    pad_token="<pad>",
    unk_token="<unk>",
    bos_token="<bos>",
    eos_token="<eos>",
    model_max_length=256,
)
config = LlamaConfig(
    vocab_size=2000,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    pad_token_id=0,
    bos_token_id=2,
    eos_token_id=3,
)
LlamaForCausalLM(config).save_pretrained(folder / "model")
words.save_pretrained(folder / "model")


def text(low, high):
    return " ".join(f"w{random.randrange(4, 2000)}" for _ in range(random.randint(low, high)))


def lines(name, make, count):
    path = folder / name / "train.jsonl"
    path.parent.mkdir()
    path.write_text("".join(json.dumps(make()) + "\n" for _ in range(count)))


lines("texts", lambda: {"text": text(20, 150)}, 512)
lines(
    "pairs",
    lambda: {"prompt": text(8, 40), "chosen": " " + text(8, 60), "rejected": " " + text(8, 60)},
    256,
)
lines("prompts", lambda: {"prompt": text(8, 20)}, 128)
