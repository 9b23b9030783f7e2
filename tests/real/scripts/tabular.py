"""rtdl's FT-Transformer on numbers and categories, with its own groups for AdamW."""

import torch
from common import device, options
from rtdl_revisiting_models import FTTransformer

args = options(128)
gpu = device()
model = FTTransformer(
    n_cont_features=12,
    cat_cardinalities=[4, 9],
    d_out=1,
    n_blocks=2,
    d_block=96,
    attention_n_heads=8,
    attention_dropout=0.2,
    ffn_d_hidden=None,
    ffn_d_hidden_multiplier=4 / 3,
    ffn_dropout=0.1,
    residual_dropout=0.0,
).to(gpu)
optimizer = torch.optim.AdamW(model.make_parameter_groups(), lr=1e-4, weight_decay=1e-5)
data = torch.utils.data.TensorDataset(
    torch.randn(8192, 12),
    torch.stack([torch.randint(4, (8192,)), torch.randint(9, (8192,))], 1),
    torch.randn(8192),
)
for numbers, kinds, wanted in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
    guess = model(numbers.to(gpu), kinds.to(gpu)).squeeze(-1)
    loss = torch.nn.functional.mse_loss(guess, wanted.to(gpu))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
