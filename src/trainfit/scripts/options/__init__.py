"""A script's options by their parser, values that words override, and its constants."""
