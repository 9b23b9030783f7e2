"""Records a training inside the user's process: steps, phases, events, batches of workers."""
