"""What passes between GPUs: of one simulated rank, and within a process."""
