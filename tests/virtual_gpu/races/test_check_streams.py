"""Programs with and without the ordering that they need: the one makes no race, the other makes one that is named."""

from __future__ import annotations

import contextlib

import pytest
import torch
from foreign_frames import call_in

from lowmem_ft import VirtualGPU
from lowmem_ft.foundation.errors import RaceError
from lowmem_ft.foundation.upstream import patches
from lowmem_ft.virtual_gpu.costs.one_process import one_of_several
from lowmem_ft.virtual_gpu.device import registration

LARGE, SMALL = 2**20, 2**10
"""Elements, of the caching allocator's large pool and of its small one."""


def races_of(program, *args):
    gpu = VirtualGPU("t4", check_streams=True)
    with one_of_several(2, 0), contextlib.suppress(RaceError), gpu:
        program(*args)
    return gpu.races


def pinned(count=SMALL):
    return torch.zeros(count, pin_memory=True)


def on_gpu(count=SMALL):
    return torch.zeros(count, device="cuda")


def current():
    return torch.cuda.current_stream()


def a_copy_that_computing_uses(ordered):
    host, here, stream = pinned(), on_gpu(), torch.cuda.Stream()
    stream.wait_stream(current())
    with torch.cuda.stream(stream):
        here.copy_(host, non_blocking=True)
    if ordered:
        current().wait_stream(stream)
    here.sum()


def a_target_that_computing_still_reads(ordered):
    host, here, stream = pinned(), on_gpu(), torch.cuda.Stream()
    stream.wait_stream(current())
    here.sum()
    if ordered:
        stream.wait_event(current().record_event())
    with torch.cuda.stream(stream):
        here.copy_(host, non_blocking=True)


def a_source_that_computing_changes(ordered):
    host, here, stream = pinned(), on_gpu(), torch.cuda.Stream()
    stream.wait_stream(current())
    with torch.cuda.stream(stream):
        host.copy_(here, non_blocking=True)
        event = stream.record_event()
    if ordered:
        event.wait()
    here.add_(1)


def host_memory_that_is_read_too_early(ordered):
    host = pinned()
    host.copy_(on_gpu(), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    if ordered:
        event.synchronize()
    host.sum()


def host_memory_that_is_filled_anew_too_early(ordered):
    host, here = pinned(), on_gpu()
    here.copy_(host, non_blocking=True)
    if ordered:
        torch.cuda.synchronize()
    host.fill_(1)


def a_result_on_the_host_that_nobody_waits_for(ordered):
    host = on_gpu().to("cpu", non_blocking=not ordered)
    host.tolist()


def an_event_that_is_recorded_too_early(ordered):
    host, event = pinned(), torch.cuda.Event()
    if not ordered:
        event.record()
    host.copy_(on_gpu(), non_blocking=True)
    if ordered:
        event.record()
    event.synchronize()
    host.sum()


def an_event_that_is_recorded_again(ordered):
    host, event = pinned(), torch.cuda.Event()
    for number in range(2):
        host.copy_(on_gpu(), non_blocking=True)
        if ordered or number == 0:
            event.record()
    event.synchronize()
    host.sum()


def memory_that_another_stream_has_used(ordered):
    stream = torch.cuda.Stream()
    here = on_gpu(LARGE)
    stream.wait_stream(current())
    with torch.cuda.stream(stream):
        here.sum()
    if ordered:
        here.record_stream(stream)
    del here
    on_gpu(LARGE)


def memory_that_is_waited_for_before_the_next_allocation(ordered):
    stream = torch.cuda.Stream()
    here = on_gpu(LARGE)
    stream.wait_stream(current())
    with torch.cuda.stream(stream):
        here.sum()
    del here
    if ordered:
        current().wait_stream(stream)
    on_gpu(LARGE)


def new_memory_on_a_stream_that_did_not_wait(ordered):
    """What computing has just let go may be what the other stream gets."""
    host, stream = pinned(LARGE), torch.cuda.Stream()
    on_gpu(LARGE).sum()
    here = torch.empty(LARGE, device="cuda")
    if ordered:
        stream.wait_stream(current())
    with torch.cuda.stream(stream):
        here.copy_(host, non_blocking=True)


def a_prefetcher(ordered):
    """As in NVIDIA's examples: each batch comes on a stream of its own, and goes while computing uses it."""
    host, stream = pinned(LARGE), torch.cuda.Stream()
    for _ in range(3):
        with torch.cuda.stream(stream):
            batch = host.to("cuda", non_blocking=True)
        current().wait_stream(stream)
        if ordered:
            batch.record_stream(current())
        batch.sum()
        del batch


def two_parts_of_a_memory(ordered):
    host, here, stream = pinned(), on_gpu(), torch.cuda.Stream()
    stream.wait_stream(current())
    half = SMALL // 2
    with torch.cuda.stream(stream):
        here[:half].copy_(host[:half], non_blocking=True)
    here[half if ordered else half - 1 :].add_(1)


def columns_of_a_matrix(ordered):
    here, stream = on_gpu().view(32, 32), torch.cuda.Stream()
    stream.wait_stream(current())
    with torch.cuda.stream(stream):
        here[:, :16].add_(1)
    here[:, 16 if ordered else 15 :].add_(1)


def a_list_of_copies(ordered):
    host, here = [pinned(), pinned()], [on_gpu(), on_gpu()]
    torch._foreach_copy_(here, host, non_blocking=True)
    if ordered:
        torch.cuda.synchronize()
    host[1].fill_(1)


def memory_of_ones_own_that_goes(ordered):
    """torch's allocator waits for copies from and to its own pinned memory, and nobody for these."""
    host = torch.zeros(SMALL)
    torch.cuda.register_host_memory(host)
    on_gpu().copy_(host, non_blocking=True)
    if ordered:
        torch.cuda.synchronize()


def memory_of_ones_own_that_is_unregistered(ordered):
    host = torch.zeros(SMALL)
    registration = torch.cuda.register_host_memory(host)
    host[1:].copy_(on_gpu(SMALL - 1), non_blocking=True)
    event = current().record_event()
    if ordered:
        event.synchronize()
    registration.unregister()
    event.synchronize()


def memory_that_the_host_has_back(ordered):
    host = pinned()
    on_gpu().copy_(host, non_blocking=True)
    if ordered:
        current().synchronize()
    torch.cuda.host_may_use(host)


def weights_that_are_gathered(ordered):
    """As FSDP2 does: what one stream gathers, another computes with."""
    part, whole, stream = on_gpu(), on_gpu(2 * SMALL), torch.cuda.Stream()
    stream.wait_stream(current())
    with torch.cuda.stream(stream):
        torch.ops.c10d._allgather_base_(whole, part, torch.distributed.group.WORLD.boxed(), False)
    if ordered:
        current().wait_stream(stream)
    whole.sum()


def gradients_that_are_summed(ordered):
    gradient, stream = on_gpu(), torch.cuda.Stream()
    stream.wait_stream(current())
    gradient.sum()
    if ordered:
        stream.wait_stream(current())
    with torch.cuda.stream(stream):
        torch.distributed.all_reduce(gradient)


PROGRAMS = {
    a_copy_that_computing_uses: "read after write",
    a_target_that_computing_still_reads: "write after read",
    a_source_that_computing_changes: "write after read",
    host_memory_that_is_read_too_early: "read after write",
    host_memory_that_is_filled_anew_too_early: "write after read",
    a_result_on_the_host_that_nobody_waits_for: "read after write",
    an_event_that_is_recorded_too_early: "read after write",
    an_event_that_is_recorded_again: "read after write",
    memory_that_another_stream_has_used: "reuse of memory",
    memory_that_is_waited_for_before_the_next_allocation: "reuse of memory",
    new_memory_on_a_stream_that_did_not_wait: "reuse of memory",
    a_prefetcher: "reuse of memory",
    two_parts_of_a_memory: "write after write",
    columns_of_a_matrix: "write after write",
    a_list_of_copies: "write after read",
    memory_of_ones_own_that_goes: "free after read",
    memory_of_ones_own_that_is_unregistered: "free after write",
    memory_that_the_host_has_back: "write after read",
    weights_that_are_gathered: "read after write",
    gradients_that_are_summed: "write after read",
}


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_what_is_in_order_is_no_race_and_what_is_not_is_one(program):
    assert races_of(program, True) == ()
    assert {race.kind for race in races_of(program, False)} == {PROGRAMS[program]}


def test_what_cuda_itself_puts_in_order_is_no_race():
    def program():
        pageable, locked, here = torch.zeros(SMALL), pinned(), on_gpu()
        here.copy_(pageable, non_blocking=True)
        pageable.add_(1)  # the driver has taken it all in
        pageable.copy_(here, non_blocking=True)
        pageable.add_(1)  # the driver has waited
        locked.copy_(here)
        locked.add_(1)
        locked.copy_(here, non_blocking=True)
        here.sum().item()
        locked.add_(1)
        event = torch.cuda.Event()
        locked.copy_(here, non_blocking=True)
        event.record()
        while not event.query():
            pass
        locked.add_(1)
        torch.cuda.Event().synchronize()  # never recorded: over
        here.copy_(locked, non_blocking=True)
        del locked  # its allocator waits for the copy
        torch.zeros(SMALL, pin_memory=True)

    assert races_of(program) == ()


def test_a_block_of_one_pool_is_never_used_again_in_the_other():
    def program(count):
        here, stream = on_gpu(LARGE), torch.cuda.Stream()
        stream.wait_stream(current())
        with torch.cuda.stream(stream):
            here.sum()
        del here
        on_gpu(count)

    assert races_of(program, SMALL) == ()
    assert len(races_of(program, LARGE)) == 1


def test_a_backward_pass_runs_behind_the_stream_of_its_forward():
    def program():
        weight, stream = on_gpu().requires_grad_(), torch.cuda.Stream()
        stream.wait_stream(current())
        with torch.cuda.stream(stream):
            loss = (weight * 2).sum()
        loss.backward()

    assert races_of(program) == ()


def test_a_race_is_told_with_both_lines_and_what_the_memory_is():
    def program():
        host, model, stream = pinned(64), torch.nn.Linear(64, 1, device="cuda"), torch.cuda.Stream()
        stream.wait_stream(current())
        with torch.cuda.stream(stream):
            model.weight.data.copy_(host.view(1, 64), non_blocking=True)
        model(torch.zeros(1, 64, device="cuda"))

    [race] = races_of(program)
    first = program.__code__.co_firstlineno + 4
    assert (race.first.operator, race.first.writes, race.first.stream) == ("copy_", True, 1)
    assert (race.second.operator, race.second.writes, race.second.stream) == ("addmm", False, 0)
    assert [use.places[0].split(" in ")[0].rpartition(":")[2] for use in (race.first, race.second)] == [
        str(first),
        str(first + 1),
    ]
    assert "test_check_streams.py" in race.first.places[0]
    assert (race.place, race.category, race.size_bytes) == ("device", "parameter", 256)
    assert "reads 256 B of device memory (parameter) and does not wait for copy_ on stream 1" in str(race)


@pytest.mark.parametrize("between", [registration, patches], ids=lambda module: module.__name__)
def test_calls_of_ours_in_between_are_no_lines_of_a_race(between):
    def program():
        host, here, stream = pinned(), on_gpu(), torch.cuda.Stream()
        stream.wait_stream(current())
        with torch.cuda.stream(stream):
            call_in(between)(host.copy_, here, True)
        here.add_(1)

    [race] = races_of(program)
    assert ["test_check_streams.py" in place for place in race.first.places] == [True]


def test_the_block_ends_with_an_error_and_the_report_has_them_all():
    gpu = VirtualGPU("t4", check_streams=True)
    with (
        pytest.raises(
            RaceError,
            match=r"Streams that use the same memory must be synchronized, .* \(1 race\)\. Let one wait",
        ),
        gpu,
    ):
        a_copy_that_computing_uses(False)
    assert len(gpu.report().races) == 1
    assert gpu.report().races == gpu.races


def test_an_error_of_the_program_itself_is_not_hidden():
    def program():
        with VirtualGPU("t4", check_streams=True):
            a_copy_that_computing_uses(False)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        program()


def test_nobody_looks_unless_told_to():
    with VirtualGPU("t4") as gpu:
        a_copy_that_computing_uses(False)
    assert gpu.report().races == gpu.races == ()


def test_looking_changes_neither_memory_nor_work():
    def trace(gpu):
        with gpu:
            network = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).cuda()
            optimizer = torch.optim.AdamW(network.parameters())
            for _ in range(2):
                network(torch.randn(8, 64).cuda()).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return gpu.trace()

    plain, checked = trace(VirtualGPU("t4")), trace(VirtualGPU("t4", check_streams=True))
    assert plain.timeline == checked.timeline
    assert plain.work == checked.work
