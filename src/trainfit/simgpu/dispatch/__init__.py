"""How operators reach the simulated device: its tensor, modes, engine and errors."""
