import torch
import torch.nn as nn
import torch.nn.functional as F

dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
actor = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 4)).to(dev)
critic = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 1)).to(dev)
oa, oc = torch.optim.Adam(actor.parameters(), 1e-3), torch.optim.Adam(critic.parameters(), 1e-3)
for _ in range(200):
    s, ret = torch.randn(128, 8).to(dev), torch.randn(128).to(dev)
    dist = torch.distributions.Categorical(logits=actor(s))
    a = dist.sample()
    v = critic(s).squeeze(1)
    adv = ret - v
    policy_loss = -(dist.log_prob(a) * adv).mean()
    value_loss = F.mse_loss(v, ret)
    oa.zero_grad()
    oc.zero_grad()
    (policy_loss + value_loss).backward()
    oa.step()
    oc.step()
