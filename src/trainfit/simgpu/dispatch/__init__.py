"""How operators reach the simulated device: modes, engine, results' geometry and values."""
