"""pytorch-forecasting: an N-BEATS on series of its own data set, trained by Lightning."""

import lightning
import numpy as np
import pandas
from common import options
from pytorch_forecasting import NBeats, TimeSeriesDataSet

args = options(64)
make = np.random.default_rng(0)
table = pandas.DataFrame(
    {
        "series": np.repeat(np.arange(20).astype(str), 100),
        "time": np.tile(np.arange(100), 20),
        "value": make.normal(size=2000).cumsum().astype(np.float32),
    }
)
data = TimeSeriesDataSet(
    table,
    time_idx="time",
    target="value",
    group_ids=["series"],
    max_encoder_length=30,
    min_encoder_length=30,
    max_prediction_length=10,
    time_varying_unknown_reals=["value"],
)
model = NBeats.from_dataset(data, learning_rate=1e-3, widths=[32, 256])
trainer = lightning.Trainer(max_epochs=1, gradient_clip_val=0.1, logger=False)
trainer.fit(model, data.to_dataloader(train=True, batch_size=args.batch_size, num_workers=0))
