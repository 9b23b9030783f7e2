"""Reinforcement learning: stable-baselines3's DQN or PPO on a task with four numbers."""

import sys

import gymnasium
import numpy as np
import stable_baselines3
import torch
from common import options

method = sys.argv.pop(1)
args = options(64)


class Reach(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-10, 10, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.place, self.left = self.np_random.normal(size=4).astype(np.float32), 50
        return self.place, {}

    def step(self, action):
        self.place = np.clip(self.place + (0.1 if action else -0.1), -10, 10).astype(np.float32)
        self.left -= 1
        return self.place, -float(np.abs(self.place).sum()), False, self.left == 0, {}


make = getattr(stable_baselines3, method)
more = {"learning_starts": 200} if method == "DQN" else {"n_steps": 512}
gpu = "cuda" if torch.cuda.is_available() else "cpu"
wide = {"net_arch": [256, 256]}
model = make(
    "MlpPolicy", Reach(), batch_size=args.batch_size, device=gpu, policy_kwargs=wide, **more
)
model.learn(2048)
