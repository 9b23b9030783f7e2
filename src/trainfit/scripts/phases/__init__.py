"""What a training does between its steps: evaluations, checkpoints, periodic work."""
