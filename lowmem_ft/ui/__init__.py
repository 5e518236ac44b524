"""The page of ``lowmem-ft ui``: estimates and plans in a browser on this machine, by the functions of the commands."""
