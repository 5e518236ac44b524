"""The range of a step's seconds: the clock's own share, and the hosts that a rented GPU may have."""

import math

import pytest

from lowmem_ft.foundation.catalog.clock_rates import clock_rates, host_range, reference_host
from lowmem_ft.foundation.memory.memory_estimate import StepTime


def step(**fields):
    return StepTime(seconds=10.0, tokens=1, bound_by="compute", seconds_share=0.25, **fields)


def test_without_waits_the_range_is_the_clocks_own():
    found = step(host_share=0.0, host_range=(0.4, 1.5))
    assert (found.low_seconds, found.high_seconds) == pytest.approx((8.0, 12.5))


def test_waits_for_the_host_widen_it_by_the_hosts_that_are_known():
    found = step(host_share=0.5, host_range=(0.4, 1.5))
    both = math.hypot(math.log(0.5 + 0.5 * 0.4), math.log(1.25))  # independent of each other
    assert found.low_seconds == pytest.approx(10 / math.exp(both))
    assert found.high_seconds == pytest.approx(10 * math.exp(math.sqrt(2) * math.log(1.25)))


def test_the_known_hosts_are_those_of_the_clocks_rows():
    fastest, slowest = host_range()
    assumed = reference_host()["operator_seconds"]
    assert fastest * assumed == pytest.approx(clock_rates().operator_seconds)
    assert slowest * assumed == pytest.approx(clock_rates("t4", (7, 5)).operator_seconds)
