"""Settings that a recipe shares with other people's trainers, and the techniques that each trainer allows."""
