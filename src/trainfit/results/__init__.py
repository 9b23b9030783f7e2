"""What crosses processes and files: versioned, data only, checked when it is read."""
