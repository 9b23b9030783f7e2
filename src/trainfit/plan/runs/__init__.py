"""The simulated runs of a plan: processes, requests, outcomes, failures."""
