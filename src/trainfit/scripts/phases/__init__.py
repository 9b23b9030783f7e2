"""What a training does between its steps and after them: evaluations, checkpoints, the end."""
