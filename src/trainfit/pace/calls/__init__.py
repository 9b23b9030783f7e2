"""What is called at a rate, when each call is due, and how the wait is spent."""
