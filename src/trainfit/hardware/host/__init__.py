"""The machine as files, commands and limits, under an injectable root."""
