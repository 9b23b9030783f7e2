"""How large the samples of a data set and its batches are."""
