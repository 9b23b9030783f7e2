"""What programs and projects ask of commands: conditions, formats, defaults from files."""
