"""A step that runs out of memory starts over in smaller pieces, and is the step of a run that always had that cut."""

from __future__ import annotations

import contextlib
import json

import pytest
import torch
from batches import batch_of
from sweeps import few_quick
from tiny_models import TINY

from lowmem_ft.foundation.parallel_plan import ParallelPlan
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.optimizers import export_optimizer_state
from lowmem_ft.recipe import load_recipe
from lowmem_ft.techniques.loss.chunked_loss import ChunkedLoss
from lowmem_ft.training.folder.micro_batch_limit import MicroBatchLimit
from lowmem_ft.training.out_of_memory import retry
from lowmem_ft.training.out_of_memory.error import NotRetried
from lowmem_ft.training.out_of_memory.step_rollback import StepRollback
from lowmem_ft.training.runtimes.accelerate_runtime import launched_runtime
from lowmem_ft.training.runtimes.build import build_session, plan_session
from lowmem_ft.training.step.random_state import export_random_state, import_random_state
from lowmem_ft.training.step.step import WindowPass

CPU = torch.device("cpu")
BF16 = ("model.dtype=bfloat16", "optimizer.master=split16")
IN_BACKWARD = (*BF16, "checkpointing.mode=full", "optimizer.in_backward=true")
VERTICAL = ("checkpointing.mode=full", "accumulation.order=vertical")
STREAMED = (*IN_BACKWARD, "offload.optimizer=host", "offload.parameters=stream", "offload.activations=inputs")
ONE_MICRO_BATCH = ("training.gradient_accumulation_steps=1",)

RUNGS = {
    "horizontal": ("checkpointing.mode=none",),
    "plain loss, bf16 autocast": ("loss.chunk_tokens=null", "training.mixed_precision=bf16"),
    "dropout": ("dropout",),
    "fp16 scale": ("fp16",),
    "activations away": ("checkpointing.mode=full", "offload.activations=inputs"),
    "all activations away": ("checkpointing.mode=none", "offload.activations=all", "long rows"),
    "one micro-batch, bf16": (*BF16, *ONE_MICRO_BATCH),
    "vertical": (*BF16, *VERTICAL, "tiling.mlp=2"),
    "fused sums, one micro-batch": (*BF16, "accumulation.fusion=true", *ONE_MICRO_BATCH),
    "fused bf16 sums, one micro-batch": (
        *BF16,
        "accumulation.fusion=true",
        "accumulation.dtype=weights",
        *ONE_MICRO_BATCH,
    ),
    "fused sums, in backward": (*IN_BACKWARD, "accumulation.order=vertical", "accumulation.fusion=true"),
    "vertical, dropout": (*VERTICAL, "dropout"),
    "in backward": (*IN_BACKWARD, *ONE_MICRO_BATCH),
    "in backward, host": (*IN_BACKWARD, "accumulation.order=vertical", "offload.optimizer=host"),
    "in backward, host, one micro-batch": (*IN_BACKWARD, *ONE_MICRO_BATCH, "offload.optimizer=host"),
    "streamed": (*STREAMED, "accumulation.order=vertical", "tiling.head=3"),
    "streamed, dropout, one micro-batch": (*STREAMED, *ONE_MICRO_BATCH, "dropout"),
    "lora": ("adapter.name=lora", "adapter.r=4", "dropout"),
    "lora, streamed": (
        "adapter.name=lora",
        "adapter.r=4",
        "offload.parameters=stream",
        "checkpointing.mode=full",
    ),
    "bitsandbytes": ("optimizer.name=adamw_bnb_8bit", *ONE_MICRO_BATCH, "model.dtype=bfloat16"),
}


DIFFER_MOST = ("vertical, dropout", "streamed")


class OutOfMemoryAt(StorageTracker):
    """Refuses some allocations, or all while it is full, as a device does; counts what is alive."""

    def __init__(self):
        super().__init__("cpu")
        self.at, self.count, self.is_full, self.seen = (), 0, False, lambda: None

    def refuse(self, *at):
        self.at, self.count = at, 0

    def _measure(self, storage):
        if storage._cdata not in self._bytes_by_storage:
            self.count += 1
            self.seen()
            if self.count in self.at or self.is_full:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB.\nGPU 0 has ...")
        super()._measure(storage)


class FullWithinBytes(StorageTracker):
    """A device of some bytes beside what was there before."""

    def __init__(self, limit_bytes):
        super().__init__("cpu")
        self.limit_bytes, self.num_refused = limit_bytes, 0

    def _measure(self, storage):
        is_new = storage._cdata not in self._bytes_by_storage
        if is_new and self.live_bytes + storage.nbytes() > self.limit_bytes:
            self.num_refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory.")
        super()._measure(storage)


@pytest.fixture
def model_of(tmp_path):
    """The tiny model with four layers: more than there are slots to stream them through."""

    def make(**changes):
        folder = tmp_path / "model"
        folder.mkdir(exist_ok=True)
        config = json.loads((TINY / "config.json").read_text()) | {"num_hidden_layers": 4} | changes
        (folder / "config.json").write_text(json.dumps(config))
        return f"model={folder}"

    return make


@pytest.fixture
def retries_of(tmp_path, model_of):
    """Sessions that answer to errors, alike if made alike."""

    def make(*overrides, **changes):
        settings = [o for o in overrides if "=" in o]
        model = model_of(**({"attention_dropout": 0.2} if "dropout" in overrides else {}), **changes)
        recipe = load_recipe("tiny", [model, "training.use_cpu=true", *settings])
        runtime = launched_runtime(recipe.training, tmp_path)
        if "fp16" in overrides:  # on a GPU alone, says the recipe; torch has it on a CPU, too
            runtime.machine.mixed_precision = "fp16"
            runtime.machine.loss_scale.scaler = torch.amp.GradScaler("cpu")
        torch.manual_seed(0)
        session = build_session(recipe, runtime, plan_session(recipe, runtime), num_training_steps=1000)
        return retry.Retries(session, recipe)

    return make


def windows(rung):
    """Rows of unequal lengths, other ones in each step."""
    num_micro_batches = 1 if "training.gradient_accumulation_steps=1" in rung else 2
    lengths = (200, 128, 130, 199) if "long rows" in rung else (24, 9, 16, 23)
    for seed in range(10**6):
        generator = torch.Generator().manual_seed(seed)
        yield [rows_of(lengths, generator) for _ in range(num_micro_batches)]


def rows_of(lengths, generator):
    ids_BT = torch.randint(1, 500, (len(lengths), max(lengths)), generator=generator)
    labels_BT = ids_BT.clone()
    for row, length in enumerate(lengths):
        labels_BT[row, length:] = -100
    labels_BT[:, 0] = -100
    return batch_of(ids_BT, labels_BT, lengths)


def state_of(session):
    """Weights and optimizer state, at rest."""
    session.techniques.flush()
    with session.techniques.at_rest():
        weights = {name: p.detach().clone() for name, p in session.unwrapped_model.named_parameters()}
    state = export_optimizer_state(session.optimizer, session.unwrapped_model.named_parameters())
    tensors = {name: tensor.clone() for name, tensor in state.tensors.items()}
    return weights | {f"state.{name}": tensor for name, tensor in tensors.items()}, state.scalars


def assert_same_state(one, other):
    (tensors, scalars), (others, other_scalars) = state_of(one), state_of(other)
    assert scalars == other_scalars
    assert tensors.keys() == others.keys()
    different = [name for name in tensors if not torch.equal(tensors[name], others[name])]
    assert not different


def places_of(tracker, retries, window, monkeypatch):
    """The allocations of a step that come before the first weight changes, updates of the step before left out."""
    places, is_committed = [], False
    apply_gradients = retry.apply_gradients

    def committed(*args):
        nonlocal is_committed
        is_committed = True
        return apply_gradients(*args)

    def seen():
        if not is_committed and not retries.session.techniques.is_updating:
            places.append(tracker.count)

    with monkeypatch.context() as patch:
        patch.setattr(retry, "apply_gradients", committed)
        tracker.refuse()
        tracker.seen = seen
        retries.train_step(window)
        tracker.seen = lambda: None
    return places


def sweep(retries_of, rung, monkeypatch, choose):
    """Refuse one allocation a step, and compare with a session that has the cut of each step from its beginning.

    Returns the number of steps in which one was refused.
    """
    settings = RUNGS[rung]
    refused, cut = retries_of(*settings), retries_of(*settings)
    data = windows(settings)
    live_bytes, num_refused = [], 0
    take = retry.StepRollback.of

    def begin(*args):
        waiting = refused.session.host_memory.bytes_by_category.get("activation", 0)
        live_bytes.append(tracker.live_bytes - waiting)
        return take(*args)

    def both_take(step):
        window, start = next(data), export_random_state(CPU)
        result = step(window)
        import_random_state(start, CPU)
        cut.train_step(window)
        return result

    monkeypatch.setattr(retry.StepRollback, "of", begin)
    with OutOfMemoryAt() as tracker:
        both_take(refused.train_step)
        places = both_take(lambda window: places_of(tracker, refused, window, monkeypatch))
        assert len(places) > 100
        for number, at in enumerate([places[len(places) // 3], *choose(places)]):
            if number == 1:  # what a cut needs is on from now on
                refused.apply(MicroBatchLimit())
                cut.apply(MicroBatchLimit())
                places = both_take(lambda window: places_of(tracker, refused, window, monkeypatch))
            if at not in places:
                continue
            window = next(data)
            start = export_random_state(CPU)
            refused.apply(MicroBatchLimit())
            live_bytes.clear()
            tracker.refuse(at)
            result = refused.train_step(window)
            tracker.refuse()
            num_refused += 1
            assert refused.num_retries == 1, f"allocation {at}"
            assert refused.cut != MicroBatchLimit()
            assert live_bytes[1] <= live_bytes[0], f"allocation {at}"
            end = export_random_state(CPU)
            import_random_state(start, CPU)
            cut.apply(refused.cut)
            expected = cut.train_step(window)
            assert cut.num_retries == 0
            assert result.loss == expected.loss, f"allocation {at}"
            assert result.grad_norm == expected.grad_norm, f"allocation {at}"
            assert result.num_tokens == expected.num_tokens
            assert result.applied == expected.applied
            assert end == export_random_state(CPU)
    assert_same_state(refused.session, cut.session)
    return num_refused


@pytest.mark.parametrize("rung", DIFFER_MOST)
def test_a_refused_allocation_changes_nothing_but_the_cut(rung, retries_of, monkeypatch):
    assert sweep(retries_of, rung, monkeypatch, lambda places: [places[-1]]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("rung", RUNGS)
def test_any_allocation_may_be_refused(rung, retries_of, monkeypatch):
    """Every fourth of them, beginning elsewhere at each rung: most are those of the rungs before."""
    first = [*RUNGS].index(rung) % 4
    assert sweep(retries_of, rung, monkeypatch, lambda places: places[first::4]) > 25


@pytest.mark.parametrize("rung", ["one micro-batch, bf16", "streamed, dropout, one micro-batch"])
def test_a_step_that_runs_out_twice_is_cut_twice(rung, retries_of, monkeypatch):
    settings = RUNGS[rung]
    refused, cut = retries_of(*settings), retries_of(*settings)
    data = windows(settings)
    first, second = next(data), next(data)
    start = export_random_state(CPU)
    with OutOfMemoryAt() as tracker:
        places = places_of(tracker, refused, first, monkeypatch)
        tracker.refuse(places[len(places) // 2], places[len(places) // 2] + len(places) // 2)
        result = refused.train_step(second)
    assert refused.num_retries == 2
    import_random_state(start, CPU)
    cut.train_step(first)
    cut.apply(refused.cut)
    assert cut.train_step(second).loss == result.loss
    assert cut.num_retries == 0
    assert_same_state(refused.session, cut.session)


@pytest.mark.parametrize(
    "rung",
    few_quick(
        ["fp16 scale", "all activations away", "in backward, host", "streamed"],
        ["all activations away", "streamed"],
    ),
)
def test_to_forget_a_window_takes_no_memory(rung, retries_of, monkeypatch):
    """There may be none left: the device has nothing back yet."""
    settings = RUNGS[rung]
    retries, data = retries_of(*settings), windows(settings)
    forget = retries._forget_window

    def full():
        tracker.is_full = True
        forget()
        tracker.is_full = False

    monkeypatch.setattr(retries, "_forget_window", full)
    with OutOfMemoryAt() as tracker:
        places = places_of(tracker, retries, next(data), monkeypatch)
        tracker.refuse(places[-len(places) // 4])
        retries.train_step(next(data))
    assert retries.num_retries == 1


def test_to_forget_a_window_drops_the_factor_of_its_clipping(retries_of):
    settings = (*BF16, *ONE_MICRO_BATCH, "training.max_grad_norm=0.01")
    retries = retries_of(*settings)
    WindowPass(retries.session, next(windows(settings))).gradients()
    assert retries.session.optimizer.gradient_factor is not None
    retries._forget_window()
    assert retries.session.optimizer.gradient_factor is None


def place_where(tracker, retries, data, condition):
    """The number of the first allocation of a step at which a condition holds, and of all."""
    found = []
    for _ in range(2):
        found.clear()
        tracker.refuse()
        tracker.seen = lambda: condition() and found.append(tracker.count)
        retries.train_step(next(data))
        tracker.seen = lambda: None
    return found[0] if found else None, tracker.count


@pytest.mark.parametrize("rung", ["horizontal", "streamed"])
def test_an_error_inside_an_update_is_not_retried(rung, retries_of):
    """Be it the step's own or, at a layer's visit, that of the step before."""
    settings = RUNGS[rung]
    retries, data = retries_of(*settings), windows(settings)
    techniques = retries.session.techniques
    with OutOfMemoryAt() as tracker:
        in_update, last = place_where(tracker, retries, data, lambda: techniques.is_updating)
        tracker.refuse(in_update or last)
        with pytest.raises(NotRetried, match="inside an update of the weights") as raised:
            retries.train_step(next(data))
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
    assert retries.num_retries == 0


def with_routers_loss(retries):
    retries.session.unwrapped_model.config.output_router_logits = True


def with_batch_norm(retries):
    retries.session.unwrapped_model.model.norm.beside = torch.nn.BatchNorm1d(2)


def with_two_processes(retries):
    retries.session.runtime.ranks.plan = ParallelPlan(num_processes=2)


@pytest.mark.parametrize(
    "settings,change,lengths,reason",
    [
        ((), with_routers_loss, (24, 9), "load-balancing loss is computed over all its rows"),
        ((), with_batch_norm, (24, 9), "batch norm"),
        ((), with_two_processes, (24, 9), "With several processes"),
        ((), None, (24,), "a single row or document"),
        (("budget.retry=false",), None, (24, 9), "budget.retry=false"),
        ((*IN_BACKWARD, *ONE_MICRO_BATCH, "training.max_grad_norm=null"), None, (24, 9), "without clipping"),
        (
            (*IN_BACKWARD, *ONE_MICRO_BATCH, "checkpointing.mode=none"),
            None,
            (24, 9),
            "inside the layers, but not all of them are checkpointed",
        ),
        ((*IN_BACKWARD, *ONE_MICRO_BATCH, "checkpointing.mode=none"), None, (24,), "a single row"),
    ],
)
def test_what_cannot_start_over_says_why(settings, change, lengths, reason, retries_of):
    retries = retries_of(*settings)
    window = [rows_of(lengths, torch.Generator().manual_seed(0))]
    if change is not None:
        change(retries)
    with OutOfMemoryAt() as tracker:
        tracker.refuse(40)
        with pytest.raises(NotRetried, match=reason):
            retries.train_step(window)
    assert retries.cut == MicroBatchLimit()


def test_layers_that_take_no_part_of_the_rows_are_named_and_not_the_order_that_nobody_asked_for(retries_of):
    retries = retries_of(*IN_BACKWARD, *ONE_MICRO_BATCH, model_type="bloom")
    with OutOfMemoryAt() as tracker:
        tracker.refuse(40)
        with pytest.raises(NotRetried) as refused:
            retries.train_step([rows_of((24, 9), torch.Generator().manual_seed(0))])
    assert "take the argument alibi" in refused.value.reason
    assert "Set training.per_device_train_batch_size lower" in refused.value.reason
    assert "vertical" not in refused.value.reason


def test_layers_that_turn_out_to_return_something_else_are_told_likewise(retries_of):
    """Their signature shows nothing of it: the step that starts over meets it."""
    retries = retries_of(*IN_BACKWARD, *ONE_MICRO_BATCH)
    layer = retries.session.unwrapped_model.model.layers[0]
    forward = layer.forward
    layer.forward = lambda h, **kwargs: {"h": forward(h, **kwargs)} if len(h) == 1 else forward(h, **kwargs)
    with OutOfMemoryAt() as tracker:
        tracker.refuse(40)
        with pytest.raises(NotRetried, match="return something other than tensors: dict"):
            retries.train_step([rows_of((24, 9), torch.Generator().manual_seed(0))])


def test_one_micro_batch_is_not_made_two_where_their_float32_sums_do_not_fit(retries_of, monkeypatch):
    settings = (*BF16, *ONE_MICRO_BATCH)
    retries, data = retries_of(*settings), windows(settings)
    monkeypatch.setattr(retry, "free_device_bytes", lambda device: 1000)
    with OutOfMemoryAt() as tracker:
        tracker.refuse(100)
        window = next(data)
        with pytest.raises(NotRetried, match=r"summed in float32.*1000 B are free"):
            retries.train_step(window)
    assert all(parameter.grad_dtype != torch.float32 for parameter in retries.session.trainable_parameters())


@pytest.mark.parametrize("rung,num_retries", [("in backward", 0), ("streamed, dropout, one micro-batch", 1)])
def test_sums_of_what_backward_spends_at_once_are_of_its_largest_part(
    rung, num_retries, retries_of, monkeypatch
):
    """The embedding, unless it is streamed and its gradient comes in pieces: then a layer."""
    settings = RUNGS[rung]
    retries, data = retries_of(*settings), windows(settings)
    model = retries.session.unwrapped_model.model
    layer_bytes, embedding_bytes = (
        sum(4 * parameter.numel() for parameter in part.parameters())
        for part in (model.layers[0], model.embed_tokens)
    )
    assert layer_bytes < embedding_bytes
    monkeypatch.setattr(retry, "free_device_bytes", lambda device: embedding_bytes - 1)
    with OutOfMemoryAt() as tracker:
        tracker.refuse(100)
        with (
            contextlib.nullcontext() if num_retries else pytest.raises(NotRetried, match=r"summed in float32")
        ):
            retries.train_step(next(data))
    assert (retries.cut != MicroBatchLimit()) == bool(num_retries)


@pytest.mark.parametrize("lengths,order", [((24,), "horizontal"), ((24, 9), "vertical")])
def test_the_chunk_of_a_loss_is_halved_where_rows_would_free_nothing_of_it(lengths, order, retries_of):
    retries = retries_of("checkpointing.mode=full", f"accumulation.order={order}", "loss.chunk_tokens=300")
    window = [rows_of(lengths, torch.Generator().manual_seed(seed)) for seed in range(4)]
    loss = retries.session.techniques.find(ChunkedLoss)
    if order == "horizontal":
        window = [rows_of((100,), torch.Generator().manual_seed(0))]
    with OutOfMemoryAt() as tracker:
        in_loss, _ = place_where(tracker, retries, iter([window] * 2), lambda: loss.is_running)
        tracker.refuse(in_loss + 2)
        retries.train_step(window)
    assert retries.num_retries == 1
    num_labels = sum(batch.num_label_tokens for batch in window)
    assert retries.cut == MicroBatchLimit(max_loss_tokens=num_labels // 2)


@pytest.mark.parametrize("order", ["horizontal", "vertical"])
def test_a_device_that_is_a_quarter_too_small_is_trained_on(order, retries_of):
    retries = retries_of("checkpointing.mode=full", f"accumulation.order={order}")
    window = [rows_of((120,) * 4, torch.Generator().manual_seed(seed)) for seed in range(2)]
    with StorageTracker("cpu") as tracker:
        retries.train_step(window)
        needed = tracker.peak_bytes
    with FullWithinBytes(3 * needed // 4) as device:
        retries.train_step(window)
        assert device.num_refused == retries.num_retries > 0
        retries.train_step(window)
        assert retries.num_retries == 0


def test_buffers_that_forward_changes_are_put_back():
    """As rotary embeddings do that follow the longest row so far."""
    module = torch.nn.Module()
    module.register_buffer("kept", torch.ones(3))
    module.register_buffer("replaced", torch.ones(3), persistent=False)
    module.longest = 8
    before = StepRollback.of(torch.nn.Sequential(module), CPU)
    replaced, drawn = module.replaced, torch.rand(3)
    module.kept.add_(1)
    module.register_buffer("replaced", torch.zeros(5), persistent=False)
    module.register_buffer("new", torch.zeros(5))
    module.longest, module.long_frequencies = 16, torch.zeros(5)
    before.restore()
    assert torch.equal(module.kept, torch.ones(3))
    assert module.replaced is replaced
    assert module.longest == 8
    assert not hasattr(module, "new")
    assert not hasattr(module, "long_frequencies")
    assert torch.equal(torch.rand(3), drawn)
