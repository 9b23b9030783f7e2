import torch
from torch import nn

embedding, head = nn.Embedding(1000, 64).cuda(), nn.Linear(64, 1000).cuda()
optimizer = torch.optim.AdamW([*embedding.parameters(), *head.parameters()])
for step in range(60):
    tokens = torch.randint(1000, (32, 128), device="cuda")
    if step == 40:
        tokens[3, 5] = 1000
    loss = nn.functional.cross_entropy(
        head(embedding(tokens)).flatten(0, 1), tokens.clamp(max=999).flatten()
    )
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(loss.item())
