"""The truth campaign: memory measured on a real GPU. See README.md next to this."""
