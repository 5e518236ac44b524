"""What every room may use: units, errors, handles, knobs, paths, and what is installed."""
