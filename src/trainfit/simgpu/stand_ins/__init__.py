"""Stand-ins for what packages for GPUs alone do there: their operators, and calls of their C."""
