"""What the package relies on of other libraries beyond their documented interfaces, and in which versions."""
