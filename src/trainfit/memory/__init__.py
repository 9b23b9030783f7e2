"""Memory of a job: streams of every batch size, what fits, the peak explained, the sum by hand."""
