"""peft's LoRA on a decoder that is built from scratch, in a plain loop."""

import peft
import torch
from common import device, options
from transformers import AutoModelForCausalLM, Qwen2Config

args = options(4)
gpu = device()
base = AutoModelForCausalLM.from_config(
    Qwen2Config(
        vocab_size=3000,
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
)
adapter = peft.LoraConfig(
    r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
)
model = peft.get_peft_model(base, adapter).to(gpu)
model.print_trainable_parameters()
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-4)
tokens = torch.utils.data.TensorDataset(torch.randint(3000, (800, 96)))
for (rows,) in torch.utils.data.DataLoader(tokens, args.batch_size, shuffle=True):
    rows = rows.to(gpu)
    loss = model(input_ids=rows, labels=rows).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
model.save_pretrained("adapter")
