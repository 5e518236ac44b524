"""``python -m lowmem_ft``: the command ``lowmem-ft`` as a module, the form that launchers take.

accelerate launch -m lowmem_ft train recipe=NAME|PATH [key=value ...]
"""

from __future__ import annotations

from lowmem_ft.foundation.system.signals import end_at_ctrl_c

end_at_ctrl_c()

import sys  # noqa: E402

from lowmem_ft.cli import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main())
