"""A job that was simulated on one GPU, as a process of DDP, ZeRO-1 or FSDP would run it."""
