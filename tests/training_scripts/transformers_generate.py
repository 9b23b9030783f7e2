"""`generate()` of a tiny Llama; --tokens, --batch_size, --beams, --cache, --window, --warmup,
--assistant (so many tokens proposed at once)."""

import argparse

import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

parser = argparse.ArgumentParser()
parser.add_argument("--tokens", type=int, default=100)
parser.add_argument("--batch_size", type=int, default=4)
parser.add_argument("--beams", type=int, default=1)
parser.add_argument("--cache", default="dynamic")
parser.add_argument("--window", type=int)
parser.add_argument("--warmup", action="store_true")
parser.add_argument("--assistant", type=int)
options = parser.parse_args()

torch.set_default_dtype(torch.float16)
config = (MistralConfig if options.window else LlamaConfig)(
    vocab_size=1000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=1,
    num_attention_heads=8,
    max_position_embeddings=4096,
    **({"sliding_window": options.window, "num_key_value_heads": 8} if options.window else {}),
)
with torch.device("cuda"):
    model = (MistralForCausalLM if options.window else LlamaForCausalLM)(config).eval()
    draft = LlamaForCausalLM(config).eval() if options.assistant else None
assisted = {"assistant_model": draft} if draft is not None else {}
if draft is not None:
    draft.generation_config.num_assistant_tokens = options.assistant
    draft.generation_config.assistant_confidence_threshold = 0.0
prompt = torch.randint(1000, (options.batch_size, 20), device="cuda")
if options.warmup:
    model.generate(prompt[:1], max_new_tokens=3, pad_token_id=0)
for _ in range(3):
    model.generate(
        prompt,
        max_new_tokens=options.tokens,
        num_beams=options.beams,
        cache_implementation=None if options.assistant else options.cache,
        attention_mask=torch.ones_like(prompt) if options.window else None,
        do_sample=False,
        pad_token_id=0,
        **assisted,
    )
