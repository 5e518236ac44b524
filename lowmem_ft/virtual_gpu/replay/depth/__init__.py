"""Deep models from traces of shallow ones: repeated layers, proved and extrapolated."""
