"""Memory, time and cost of a run, before a GPU is rented.

    python scripts/estimate.py recipe=NAME|PATH [key=value ...] [--gpu NAME|all]

This is ``lowmem-ft estimate`` as a file.
"""

from __future__ import annotations

import sys

from lowmem_ft.cli.commands.estimate import main

if __name__ == "__main__":
    sys.exit(main())
