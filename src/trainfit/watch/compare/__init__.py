"""Two watched runs compared: what differs in their set-up, and what of their speed is proven."""
