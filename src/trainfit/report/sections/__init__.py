"""What a result says, once for every writer: a headline and sections of facts, tables, charts."""
