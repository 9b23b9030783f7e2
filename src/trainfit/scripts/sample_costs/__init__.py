"""What a sample's time is spent in, by the stack of the thread that makes it."""
