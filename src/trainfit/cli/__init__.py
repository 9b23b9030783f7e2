"""The commands: options, calls, exit codes; nothing is computed here."""
