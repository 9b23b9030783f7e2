"""Changes to a job, tried in simulated runs: mixed precision, remedies that lower its memory."""
