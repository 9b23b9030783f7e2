"""The trade between batch sizes: goodput, learning rate, advice. Arithmetic alone, no torch."""
