"""Base of every room: units, errors, handles, knobs, paths, and checks for installed packages."""
