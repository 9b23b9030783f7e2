"""What the page says of each kind of result: a headline and sections, a module a subject."""
