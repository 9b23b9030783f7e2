"""Results as text, one module a kind; no figure is computed that a result lacks."""
