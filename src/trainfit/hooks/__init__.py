"""What is looked at inside a user's process, the same in simulated, real and watched runs."""
