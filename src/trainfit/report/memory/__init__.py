"""Memory figures as text."""
