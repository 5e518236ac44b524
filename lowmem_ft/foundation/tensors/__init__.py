"""Facts about torch tensors and their storages that torch itself does not report."""
