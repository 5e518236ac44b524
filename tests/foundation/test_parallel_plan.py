import pytest

from lowmem_ft.foundation.knob import ENGINES
from lowmem_ft.foundation.parallel_plan import ParallelPlan, machines_of, plan_of
from lowmem_ft.techniques.distributed.config import DistributedConfig

PREDICATES = ("copies_weights", "shares_state", "shares_weights", "shards_rows", "has_engine")


def ranks_of(strategy, num_processes, context=1):
    return [
        plan_of(strategy, num_processes, context=context, rank=rank, num_machines=2)
        for rank in range(num_processes)
    ]


@pytest.mark.parametrize("context", [1, 2, 4])
@pytest.mark.parametrize("strategy", ENGINES)
def test_groups_partition_the_ranks(strategy, context):
    plans = ranks_of(strategy, 8, context)
    for group, size in (("context_group", context), ("shard_group", 8 if plans[0].shares_weights else 1)):
        groups = {tuple(getattr(plan, group)) for plan in plans}
        assert sorted(rank for ranks in groups for rank in ranks) == list(range(8))
        assert {len(ranks) for ranks in groups} == {size}
        assert all(plan.rank in getattr(plan, group) for plan in plans)
    assert {plan.replicas * len(plan.shard_group) for plan in plans} == {8}


def test_a_context_group_is_neighbours_that_read_the_same_rows():
    plans = ranks_of("fsdp2", 8, context=2)
    assert [(plan.data_index, plan.context_index) for plan in plans] == [
        *((0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0), (3, 1))
    ]
    assert [plan.data_index * plan.context + plan.context_index for plan in plans] == list(range(8))
    assert {plan.data_width for plan in plans} == {4}
    assert [*plans[5].context_group] == [4, 5]
    assert plans[0].rows_at_once(3) == 12
    assert plans[0].in_all(3) == 24
    assert plans[0].per_process(24) == 3
    on_first = {plan.context_group for plan in plans[: plans[0].per_machine]}
    assert max(map(max, on_first)) < plans[0].per_machine == 4


def test_what_each_strategy_shares():
    said = {
        strategy: [name for name in PREDICATES if getattr(plan_of(strategy, 4), name)]
        for strategy in ("none", *ENGINES)
    }
    assert said == {
        "none": ["copies_weights"],
        "ddp": ["copies_weights"],
        "fsdp2": ["shares_state", "shares_weights", "shards_rows"],
        "zero2": ["shares_state", "has_engine"],
        "zero3": ["shares_state", "shares_weights", "has_engine"],
    }


@pytest.mark.parametrize("word", [None, "none"])
def test_only_several_processes_have_an_engine_that_is_not_named(word):
    assert plan_of(word).engine is None
    assert plan_of(word, 2).engine == "ddp"
    assert plan_of("zero2").engine == "zero2"
    assert not plan_of("zero2").several
    assert ParallelPlan(strategy="fsdp", num_processes=2).engine is None  # of a script


def test_shares_of_tensors():
    plan = plan_of("fsdp2", 4)
    assert plan.sent_share == 0.75
    assert plan.cuts_evenly(8)
    assert not plan.cuts_evenly(10)
    assert plan_of("ddp", 4).cuts_evenly(10)  # a copy is not cut


def test_axes_that_do_not_divide_the_processes_are_a_line_each():
    plan = ParallelPlan(num_processes=6, num_machines=4, context=4)
    assert list(plan.problems()) == [
        "distributed.num_processes=6 must be a multiple of distributed.num_machines=4, because each machine has the "
        "same number of processes. Correct one of the two.",
        "distributed.num_processes=6 must be a multiple of distributed.context=4, because each row's tokens are "
        "shared by that many processes. Correct one of the two.",
    ]
    assert not list(ParallelPlan(num_processes=8, num_machines=4, context=4).problems())


def test_a_recipe_gives_it_and_the_launch_the_rank():
    config = DistributedConfig(strategy="fsdp2", num_processes=8, num_machines=2)
    assert config.plan(rank=5) == ParallelPlan(strategy="fsdp2", num_processes=8, num_machines=2, rank=5)
    assert DistributedConfig().plan() == ParallelPlan()
    assert DistributedConfig().plan(3, 1) == ParallelPlan(strategy="ddp", num_processes=3, rank=1)
    assert machines_of(8, 4) == 2
    assert machines_of(3, 4) == 1
