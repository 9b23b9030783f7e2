"""Memory of a job: streams of every batch size, replay, intervals, what fits."""
