"""Writers of a result: its sections on a terminal, as HTML, as Markdown; scripts and traces."""
