"""What goes with the settings: threads, cores, other changes, and the reason of each."""
