"""Plans a job: simulated runs in child processes, remedies, batch size, launch command."""
