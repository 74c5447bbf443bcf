"""Front end: everything that touches text. Never imports torch."""
