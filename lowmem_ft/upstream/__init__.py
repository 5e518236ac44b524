"""Names of other libraries that the package uses beyond their documented interfaces, and the tested versions."""
