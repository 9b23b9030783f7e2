"""Command line: parses options, calls the packages below, sets exit codes."""
