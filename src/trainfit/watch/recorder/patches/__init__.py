"""Where the recorder hooks PyTorch and its frameworks: each hook tells it and changes nothing."""
