"""The simulated runs of a plan: processes, outcomes, failures, what they prove of options."""
