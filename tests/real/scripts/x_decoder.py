"""x-transformers: a decoder with rotary positions, gated feed-forwards and flash attention."""

import torch
from common import device, options
from x_transformers import AutoregressiveWrapper, Decoder, TransformerWrapper

args = options(8)
gpu = device()
layers = Decoder(dim=256, depth=3, heads=4, rotary_pos_emb=True, ff_glu=True, attn_flash=True)
model = AutoregressiveWrapper(
    TransformerWrapper(num_tokens=256, max_seq_len=128, attn_layers=layers)
).to(gpu)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-4)
data = torch.utils.data.TensorDataset(torch.randint(256, (1024, 129)))
for (rows,) in torch.utils.data.DataLoader(data, args.batch_size, shuffle=True):
    loss = model(rows.to(gpu))
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    optimizer.step()
    optimizer.zero_grad()
