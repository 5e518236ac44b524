"""The finished model: its folder, card, upload, and merged adapters."""
