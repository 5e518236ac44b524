"""What host memory is left, read from a made-up machine's files."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from lowmem_ft.foundation.system import host_limits
from lowmem_ft.foundation.system.host_limits import SPARE_SHARE, tightest_host_limit
from lowmem_ft.foundation.units import GIB


@pytest.fixture(autouse=True)
def _machine(monkeypatch):
    """64 GiB free, and a process that holds 3 GiB."""
    monkeypatch.setattr(host_limits.psutil, "virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    monkeypatch.setattr(host_limits, "read_host_memory", lambda: SimpleNamespace(now_bytes=3 * GIB))


@pytest.fixture
def root(tmp_path):
    """Files of a made-up root, by path."""

    def write(files):
        for name, text in files.items():
            file = tmp_path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        return tmp_path

    return write


def usable(num_bytes):
    return round(num_bytes * (1 - SPARE_SHARE))


def test_without_a_container_the_machine_is_the_limit(root):
    limit = tightest_host_limit(None, root({}))
    assert limit.available_bytes == usable(64 * GIB)
    assert limit.source == "the machine has 64.0 GiB available"


def test_a_budget_counts_what_the_process_holds_already(root):
    limit = tightest_host_limit(10 * GIB, root({}))
    assert limit.available_bytes == 7 * GIB
    assert limit.source == "the process holds 3.00 GiB of its 10.0 GiB from budget.host"
    assert tightest_host_limit(2 * GIB, root({})).available_bytes == -GIB


@pytest.mark.parametrize("file_bytes,left", [(0, 3), (1, 4), (3, 5)])
def test_a_container_may_drop_pages_of_mapped_files_however_often_they_are_used(root, file_bytes, left):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{8 * GIB}\n",
        "sys/fs/cgroup/memory.current": f"{6 * GIB}\n",
        "sys/fs/cgroup/memory.stat": f"inactive_file {GIB}\nactive_file {2 * GIB}\n",
    }
    limit = tightest_host_limit(None, root(files), file_bytes=file_bytes * GIB)
    assert limit.available_bytes == usable(left * GIB)


@pytest.mark.parametrize("path", ["", "user.slice/run", "/"])
def test_a_cgroup_v2_limit_leaves_what_is_not_used_or_can_be_dropped(root, path):
    folder = f"sys/fs/cgroup/{path}".rstrip("/")
    files = {
        "proc/self/cgroup": f"0::/{path.strip('/')}\n",
        f"{folder}/memory.max": f"{8 * GIB}\n",
        f"{folder}/memory.current": f"{5 * GIB}\n",
        f"{folder}/memory.stat": f"anon {3 * GIB}\ninactive_file {2 * GIB}\nactive_file 7\n",
    }
    limit = tightest_host_limit(None, root(files))
    assert limit.available_bytes == usable(5 * GIB)
    assert "the container has 5.00 GiB left" in limit.source


def test_the_limit_of_a_parent_holds_for_its_children(root):
    files = {
        "proc/self/cgroup": "0::/job/task\n",
        "sys/fs/cgroup/job/task/memory.max": "max\n",
        "sys/fs/cgroup/job/task/memory.current": f"{GIB}\n",
        "sys/fs/cgroup/job/memory.max": f"{6 * GIB}\n",
        "sys/fs/cgroup/job/memory.current": f"{2 * GIB}\n",
    }
    assert tightest_host_limit(None, root(files)).available_bytes == usable(4 * GIB)


def test_a_container_that_sees_its_own_part_of_the_tree_finds_its_limit_at_the_mount(root):
    """/proc names the host's path, which does not exist inside."""
    files = {
        "proc/self/cgroup": "12:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{4 * GIB}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
    }
    assert tightest_host_limit(None, root(files)).available_bytes == usable(2 * GIB)


def test_cgroup_v1_without_a_limit_sets_none(root):
    files = {
        "proc/self/cgroup": "4:memory:/\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{3 * GIB}\n",
    }
    assert tightest_host_limit(None, root(files)).source.startswith("the machine")


def test_a_container_that_is_over_its_limit_leaves_nothing(root):
    files = {
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{2 * GIB}\n",
    }
    assert tightest_host_limit(None, root(files)).available_bytes == 0


def test_this_machines_own_files_can_be_read():
    assert tightest_host_limit(None).available_bytes > 0
