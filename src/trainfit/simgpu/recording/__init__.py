"""Records what the device does: allocations, operators, modules, the user's lines."""
