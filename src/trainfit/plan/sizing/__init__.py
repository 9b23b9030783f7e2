"""The batch size of a job: which sizes fit, how fast a step is at each, which is recommended."""
