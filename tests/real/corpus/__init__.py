"""Third-party training code, unmodified, and what trainfit has to say of it."""
