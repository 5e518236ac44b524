"""What a laptop without Linux is asked for: imports, an estimate, a plan, by the names that Python has there."""

from __future__ import annotations

import subprocess
import sys

import pytest

ABSENT = {
    "darwin": {
        "os": "sched_getaffinity sched_setaffinity posix_fadvise O_DIRECT memfd_create pidfd_open",
        "signal": "sigtimedwait sigwaitinfo",
    },
    "win32": {
        "os": "fork forkpty sched_getaffinity sched_setaffinity posix_fadvise O_DIRECT memfd_create pidfd_open getuid "
        "geteuid getgid getpgid setsid killpg sysconf statvfs getloadavg uname mkfifo wait waitid WNOHANG chown lchown "
        "posix_spawn register_at_fork",
        "signal": "SIGKILL SIGXCPU SIGHUP SIGUSR1 SIGUSR2 SIGALRM SIGCHLD SIGPIPE SIGQUIT pthread_sigmask pthread_kill "
        "alarm setitimer siginterrupt sigwait sigtimedwait sigwaitinfo sigpending",
        "time": "tzset clock_gettime",
    },
}
"""Names of modules that Python does not have there, by its documentation ("Availability")."""
ABSENT_MODULES = {
    "darwin": (),
    "win32": ("fcntl", "resource", "pwd", "grp", "termios", "tty", "pty", "posix"),
}

PROGRAM = """
import importlib, sys
import accelerate, datasets, peft, psutil, rich.console, torch, transformers  # what others do there is their own affair
import transformers.modeling_utils, torch._dynamo, torch.utils.checkpoint, torch.utils.flop_counter
import torch._subclasses.fake_tensor, torch.distributed.fsdp, multiprocessing.popen_spawn_posix, subprocess
absent, modules, platform, commands = eval(sys.argv[1])
for name, attributes in absent.items():
    for attribute in attributes.split():
        vars(importlib.import_module(name)).pop(attribute, None)
for name in modules:
    sys.modules[name] = None
sys.platform = platform
from lowmem_ft.cli import main
import lowmem_ft.cli.commands.rehearse, lowmem_ft.cli.estimating.estimate_script, lowmem_ft.ui.answering
sys.exit(max(main(command.split()) for command in commands))
"""


@pytest.mark.parametrize("platform", ABSENT)
def test_estimates_and_plans_need_no_name_that_python_lacks_there(platform, tmp_path):
    commands = [
        "estimate recipe=tiny --gpu t4",
        "estimate recipe=tiny --gpu t4 --json -",
        "gpus",
        "recipes tiny",
    ]
    asked = (ABSENT[platform], ABSENT_MODULES[platform], platform, commands)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, repr(asked)],
        capture_output=True,
        text=True,
        env={
            "PATH": "",
            "HOME": str(tmp_path),
            "PYTHONPATH": ":".join(sys.path),
            "LOWMEM_FT_TRACE_PROCESSES": "1",
        },
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "t4" in done.stdout
