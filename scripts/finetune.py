"""Fine-tune by a recipe, in one process or in many.

    accelerate launch scripts/finetune.py recipe=NAME|PATH [key=value ...]

This is ``accelerate launch -m lowmem_ft train`` as a file, for a clone of the repository.
"""

from __future__ import annotations

from lowmem_ft.foundation.system.signals import end_at_ctrl_c

end_at_ctrl_c()

import sys  # noqa: E402

from lowmem_ft.cli.commands.train import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
