"""Questions about a run, the same from a command, the page and Python, settled before torch is imported."""
