"""Bytes of memory as values: held now, at the peak, and by each tensor storage."""
