"""What a batch size does to learning: the measured noise scale, goodput, the trade explained."""
