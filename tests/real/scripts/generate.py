"""Inference: transformers' generate() with a small GPT-2."""

import torch
from common import device, options
from transformers import GPT2Config, GPT2LMHeadModel

args = options(4)
gpu = device()
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=3000, n_positions=128, n_embd=192, n_layer=4, n_head=4)
)
model.to(gpu).eval()
for _ in range(4):
    prompt = torch.randint(3000, (args.batch_size, 16), device=gpu)
    answer = model.generate(
        prompt, max_new_tokens=12, do_sample=True, top_k=50, pad_token_id=0, eos_token_id=None
    )
    print(answer.shape)
