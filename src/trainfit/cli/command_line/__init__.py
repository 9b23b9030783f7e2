"""The command line as a whole: the verbs, how their options are parsed, shell completion."""
