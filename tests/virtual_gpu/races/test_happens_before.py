"""Which bytes two accesses share: with gaps between elements, and where that is too much to look at byte by byte."""

from __future__ import annotations

import pytest

from lowmem_ft.virtual_gpu.races.happens_before import COMPUTE, LARGEST_COMPARED, HappensBefore, Memory, Span


def column(number, *, num_rows, row_bytes):
    """Four bytes of each row of a table."""
    start = 4 * number
    return Span(start, start + row_bytes * (num_rows - 1) + 4, (num_rows,), (row_bytes,), 4)


def small_column(number):
    return column(number, num_rows=100, row_bytes=64)


def large_column(number):
    """Of a table of twice what is compared byte by byte."""
    return column(number, num_rows=2**15, row_bytes=2 * LARGEST_COMPARED // 2**15)


@pytest.mark.parametrize("column", [small_column, large_column])
def test_a_column_shares_its_bytes_with_itself_and_with_the_whole(column):
    whole = Span(0, column(0).stop)
    assert column(0).shares_bytes_with(column(0))
    assert column(0).shares_bytes_with(whole)
    assert whole.shares_bytes_with(column(0))


def test_two_columns_share_nothing_as_far_as_is_looked_at():
    """What is too large to look at counts as shared: an alarm too many, and no race unseen."""
    assert not small_column(0).shares_bytes_with(small_column(1))
    assert large_column(0).shares_bytes_with(large_column(1))


@pytest.mark.parametrize("column", [small_column, large_column])
def test_what_lies_apart_shares_nothing_however_large(column):
    behind = Span(column(0).stop, column(0).stop + 8)
    assert not column(0).shares_bytes_with(behind)
    assert not behind.shares_bytes_with(column(0))


@pytest.mark.parametrize("column", [small_column, large_column])
@pytest.mark.parametrize("waits", [True, False])
def test_two_streams_in_one_column_need_an_order(column, waits):
    judge = HappensBefore()
    memory, other = Memory(), judge.new_agent()
    judge.access(COMPUTE, memory, column(0), writes=True, what="the first")
    if waits:
        judge.wait(other, judge.record(COMPUTE))
    judge.access(other, memory, column(0), writes=False, what="the second")
    assert [str(conflict) for conflict in judge.conflicts] == (
        [] if waits else ["the second does not wait for the first"]
    )


@pytest.mark.parametrize("waits", [True, False])
def test_a_write_that_its_own_stream_has_read_still_needs_an_order_with_the_reads_of_others(waits):
    judge = HappensBefore()
    memory, other = Memory(), judge.new_agent()
    judge.access(COMPUTE, memory, Span(0, 64), writes=True, what="the write")
    judge.access(COMPUTE, memory, Span(0, 64), writes=False, what="its own read")
    if waits:
        judge.wait(other, judge.record(COMPUTE))
    judge.access(other, memory, Span(0, 64), writes=False, what="the other read")
    assert [str(conflict) for conflict in judge.conflicts] == (
        [] if waits else ["the other read does not wait for the write"]
    )
