"""What memory is: bytes held now, at the peak, and by each tensor storage."""
