"""Which mixed precision a job runs in."""
