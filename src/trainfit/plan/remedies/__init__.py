"""What would lower a job's memory: each remedy tried and priced."""
