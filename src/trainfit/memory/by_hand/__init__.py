"""The arithmetic that people do by hand, next to the simulated peak."""
