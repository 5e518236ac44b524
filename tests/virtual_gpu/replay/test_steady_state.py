from lowmem_ft.foundation.memory.allocator.caching_allocator import CachingAllocator
from lowmem_ft.foundation.memory.allocator.replay import replay
from lowmem_ft.foundation.memory.memory_estimate import ModelSize
from lowmem_ft.foundation.memory.timeline import Allocation, Timeline
from lowmem_ft.virtual_gpu.calls.trace import Trace
from lowmem_ft.virtual_gpu.calls.work import BETWEEN_STEPS, WorkLog
from lowmem_ft.virtual_gpu.replay.steady_state import NUM_REPETITIONS, with_repeated_step

MIB = 2**20


class Program:
    """Allocates by hand, with marks between its steps."""

    def __init__(self) -> None:
        self.timeline = Timeline()
        self.work = WorkLog(self.timeline)

    def take(self, size_bytes: int) -> int:
        return self.timeline.malloc(Allocation(size_bytes=size_bytes))

    def step_is_over(self) -> None:
        self.work.mark(BETWEEN_STEPS)

    def trace(self) -> Trace:
        return Trace(
            timeline=self.timeline,
            work=self.work.entries,
            model=ModelSize(name="", parameters=0, trainable_parameters=0),
        )


def sizes(timeline: Timeline) -> list[tuple[str, int]]:
    return [(kind, timeline.allocations[index].size_bytes) for kind, index in timeline.events]


def test_a_step_that_leaves_nothing_behind_is_repeated() -> None:
    program = Program()
    program.take(100)
    program.step_is_over()
    for size in (1, 2):  # the first step differs from the second
        temporary = program.take(size)
        program.timeline.free(temporary)
        program.step_is_over()
    program.take(50)
    longer = with_repeated_step(program.trace())
    step = [("malloc", 2), ("free", 2)]
    assert sizes(longer) == [
        ("malloc", 100),
        ("malloc", 1),
        ("free", 1),
        *step * (1 + NUM_REPETITIONS),
        ("malloc", 50),
    ]


def test_what_a_step_replaces_is_replaced_in_every_repetition() -> None:
    program = Program()
    kept = program.take(7)
    program.step_is_over()
    for _ in range(2):
        new = program.take(7)
        program.timeline.free(kept)
        kept = new
        program.step_is_over()
    program.timeline.free(kept)
    longer = with_repeated_step(program.trace())
    assert list(longer.live_bytes())[-1] == 0
    assert max(longer.live_bytes()) == 14
    freed = [index for kind, index in longer.events if kind == "free"]
    assert sorted(freed) == list(range(len(longer.allocations)))


def test_a_step_that_leaves_something_behind_is_left_alone() -> None:
    program = Program()
    program.step_is_over()
    for _ in range(2):
        program.take(7)
        program.step_is_over()
    trace = program.trace()
    assert with_repeated_step(trace) is trace.timeline


def test_reserved_bytes_of_many_steps_are_found_from_two() -> None:
    """The second step finds holes that the first has left, fills them badly, and the third has to ask for more."""

    def run(num_steps: int) -> Program:
        program = Program()
        program.step_is_over()
        for step in range(num_steps):
            held = [program.take(size * MIB) for size in ((30, 20) if step else (20, 30))]
            program.timeline.free(held[1])
            late = program.take(24 * MIB)
            program.timeline.free(held[0])
            program.timeline.free(late)
            program.step_is_over()
        return program

    many = replay(run(8).timeline, CachingAllocator()).peak_reserved_bytes
    assert replay(with_repeated_step(run(2).trace()), CachingAllocator()).peak_reserved_bytes == many
