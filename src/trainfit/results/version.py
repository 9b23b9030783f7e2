"""trainfit's own version, for results and whoever writes them."""

__version__ = "0.1.0"
