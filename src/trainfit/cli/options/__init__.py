"""What can be typed after each verb: options, usage, and where the user's command begins."""
