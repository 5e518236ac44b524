"""The finished model: its folder, model card, upload, and merged adapters."""
