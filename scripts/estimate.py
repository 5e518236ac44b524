"""What a run will need, before a GPU is rented: memory, time and cost.

    python scripts/estimate.py recipe=NAME|PATH [key=value ...] [--gpu NAME|all]

It is ``lowmem-ft estimate`` as a file.
"""

from __future__ import annotations

import sys

from lowmem_ft.cli.commands.estimate import main

if __name__ == "__main__":
    sys.exit(main())
