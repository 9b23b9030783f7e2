"""The simulated device: its tensors, the engine that runs operators, the record of what happens."""
