"""The forms of ``lowmem-ft estimate``: a model, a script, options, output files."""
