"""pytorch-tabnet: its classifier's own fit() on arrays."""

import numpy as np
import torch
from common import options
from pytorch_tabnet.tab_model import TabNetClassifier

args = options(256)
make = np.random.default_rng(0)
x, y = make.normal(size=(4096, 20)).astype(np.float32), make.integers(0, 3, 4096)
model = TabNetClassifier(device_name="cuda" if torch.cuda.is_available() else "cpu", seed=0)
model.fit(x, y, max_epochs=2, batch_size=args.batch_size, virtual_batch_size=64)
