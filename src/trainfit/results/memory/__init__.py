"""Memory figures of recordings, and what explains them."""
