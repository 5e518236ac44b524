"""Uses that no run of :mod:`copy_cases` makes, or makes in time: each part that copies, alone, at its limits.

Each function runs on a virtual GPU (:mod:`checked_streams`), which is then :data:`DEVICE`; none makes a race.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from lowmem_ft.foundation.host.copy_engine import CopyEngine, CopyEvent
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.host.side_stream import SideStream
from lowmem_ft.optimizers import ChunkedOptimizer
from lowmem_ft.optimizers.updates.adamw import AdamW
from lowmem_ft.techniques.offload.activation_offload import OffloadPool
from lowmem_ft.techniques.offload.optimizer_offload import NUM_SLOTS, HostStorage, enable_optimizer_offload
from lowmem_ft.techniques.optimizer_in_backward import InBackward, enable_optimizer_in_backward
from lowmem_ft.techniques.streaming.embedding import StreamedEmbedding
from lowmem_ft.techniques.streaming.head import StreamedHead
from lowmem_ft.techniques.streaming.layers import LayerSlab, LayerStream
from lowmem_ft.techniques.update_overlap import UpdateOverlap

DEVICE = torch.device("cpu")
ROWS, COLUMNS = 8, 16


def _host() -> HostMemory:
    return HostMemory(DEVICE, is_limited=False)


def there_and_back() -> None:
    """Copy to the device, compute, copy to the host and drop the source, and read on the host."""
    engine, host = CopyEngine(DEVICE), _host().allocate(1024, torch.float32)
    for _ in range(4):
        here = torch.empty(1024)
        engine.wait(engine.to_device(host, here))
        engine.to_host(here * 2, host).synchronize()
        host.add_(1)
    engine.synchronize()


def memory_that_goes_while_it_is_copied() -> None:
    """Free host memory in mid-copy: it is unpinned only after its copies."""
    engine, target = CopyEngine(DEVICE), torch.empty(1024)
    engine.to_device(_host().allocate(1024, torch.float32), target)
    engine.synchronize()


def sources_on_their_way() -> None:
    """Copy more sources than the engine holds."""
    engine = CopyEngine(DEVICE)
    for place in _host().allocate((6, 512), torch.float32):
        engine.to_host(torch.ones(512), place)
    engine.synchronize()


def chunks_that_grow() -> None:
    """Visit chunks each larger than the slot it comes to, and then the same ones again at once."""
    home = HostStorage(_host())
    states = [home.allocate(64 * count, torch.float32, DEVICE) for count in range(1, 2 * NUM_SLOTS + 1)]
    for state in (*states, *states):
        for here in home.visit([{"average": state}], DEVICE):
            here["average"].add_(1)
    home.synchronize()
    assert all(state.eq(2).all() for state in states)


def _update(home: HostStorage, weight: nn.Parameter, gradient: Tensor, start: int = 0) -> None:
    part = weight.data.view(-1)[start : start + gradient.numel()]
    for here in home.visit([{"weight": part}], DEVICE):
        here["weight"].sub_(gradient.view(-1))


def rows_read_right_after_their_update() -> None:
    """Update the embedding or the head last in a step, and begin the next step with their rows."""
    memory = _host()
    home = HostStorage(memory)
    table, linear = nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, ROWS, bias=False)
    for part in (table, linear):
        part.weight = nn.Parameter(memory.allocate(part.weight.shape, torch.float32, "parameter"))
    head = StreamedHead(linear, DEVICE, memory, is_tied=False)
    embedding = StreamedEmbedding(table, DEVICE, memory, lambda: None)

    def take(weight: nn.Parameter, gradient: Tensor, start: int) -> None:
        _update(home, weight, gradient, start)

    for part in (head, embedding):
        part.train_with(take, functools.partial(home.written, part.parameter))
    ids_BT = torch.arange(ROWS).view(1, ROWS)
    tiles = [slice(0, 4), slice(4, 8)]
    for count in range(3):
        for rows in tiles:
            assert head.weight(rows).eq(-count).all()
        for rows in reversed(tiles):
            head.add_gradient(rows, torch.ones_like(head.weight(rows)))
    for count in range(3):
        hidden_BTH = table(ids_BT)
        assert hidden_BTH.eq(-count).all()
        hidden_BTH.sum().backward()
    home.synchronize()


def rows_of_one_batch_after_another() -> None:
    """Look up other tokens each time, in a table that is not trained; the host reads nothing meanwhile."""
    memory, table = _host(), nn.Embedding(ROWS, COLUMNS)
    table.weight = nn.Parameter(memory.allocate(table.weight.shape, torch.float32, "parameter"))
    table.weight.data.copy_(torch.arange(ROWS).view(ROWS, 1).expand(ROWS, COLUMNS))
    embedding = StreamedEmbedding(table, DEVICE, memory, _no_gradient)
    batches = ([1, 2, 3], [4, 5, 6], [7, 0, 1], [2, 3, 4, 5], [6])
    ids_on_both_sides = [
        [torch.tensor([tokens], device=place) for place in ("cpu", None)] for tokens in batches
    ]
    found = []
    for on_host_BT, ids_BT in ids_on_both_sides:
        embedding.expect(on_host_BT)
        found.append(table(ids_BT))
    for (_, ids_BT), hidden_BTH in zip(ids_on_both_sides, found, strict=True):
        assert hidden_BTH[..., 0].eq(ids_BT).all()


def _no_gradient() -> None:
    return None


def a_tied_gradient() -> None:
    """Keep the head's gradient on the host until the embedding adds it to its own."""
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    head = StreamedHead(linear, DEVICE, _host(), is_tied=True)
    head.train_with(_nobody_takes, CopyEvent)
    for count in range(2):
        for rows in (slice(4, 8), slice(0, 4)):
            head.add_gradient(rows, torch.full((4, COLUMNS), 1.0 + count))
        held_VH = head.held_gradient()
        assert held_VH is not None
        assert held_VH.eq(1 + count).all()


def _nobody_takes(*_: object) -> None:
    raise AssertionError


def gradients_that_wait_for_their_norm() -> None:
    """Take two steps of the clipping phase: gradients go to the host part by part, and return to be applied."""
    weights = [nn.Parameter(torch.zeros(2048)) for _ in range(3)]
    in_backward = _clipped_in_backward(weights)
    for _ in range(2):
        _take_ones(in_backward, weights, size=1024)
    assert all(weight.eq(weight[0]).all() and weight[0] != 0 for weight in weights)


def _clipped_in_backward(weights: list[nn.Parameter]) -> InBackward:
    optimizer = ChunkedOptimizer(
        weights, AdamW(), {"lr": 1.0, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    )
    enable_optimizer_offload(optimizer, _host())
    return enable_optimizer_in_backward(optimizer, device=DEVICE, max_grad_norm=1.0, memory=_host())


def _take_ones(in_backward: InBackward, weights: list[nn.Parameter], size: int) -> None:
    """Take a step with a gradient of ones, given in parts of a size."""
    for weight in weights:
        for start in reversed(range(0, weight.numel(), size)):
            in_backward.take(weight, torch.ones(size), start)
    in_backward.clip_grad_norm(_unscale_nothing)
    in_backward.update_weights(lambda: True)


def _unscale_nothing(tensor: Tensor) -> None:
    pass


def updates_beside_a_forward_pass() -> None:
    """Use weights while others are updated; end a pass after the first layer, read all, and continue."""
    layers = [nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(4)]
    weights = [weight for layer in layers for weight in layer.parameters()]
    for weight in weights:
        nn.init.zeros_(weight)
    in_backward = _clipped_in_backward(weights)
    UpdateOverlap(layers[:-1], [[weight] for weight in weights], in_backward)
    ones = torch.ones(1, COLUMNS)
    for num_layers in (4, 1, 4):
        _take_ones(in_backward, weights, size=ROWS * COLUMNS)
        seen = [layer(ones) for layer in layers[:num_layers]]
        if num_layers == 1:
            in_backward.flush()
            assert all(weight.eq(weights[0]).all() for weight in weights)
    assert all(values.eq(seen[0]).all() and seen[0][0, 0] != 0 for values in seen)


class _AddsOne:
    """Updates layers while they are in their slots, or later."""

    def __init__(self, *, at_once: bool) -> None:
        self.updates_at_once = at_once
        self.waiting: set[nn.Parameter] = set()
        side = SideStream(DEVICE)
        self.fork, self.beside = side.fork, side.beside

    def defer(self, parameters: Iterable[nn.Parameter]) -> None:
        pass

    def has_deferred(self, parameters: Iterable[nn.Parameter]) -> bool:
        return any(parameter in self.waiting for parameter in parameters)

    def apply(self, parameters: Iterable[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data.add_(1)
            self.waiting.discard(parameter)


def layers_that_are_updated_at_once() -> None:
    """Run forward, backward with a change in each layer's slot, and the host's reads and writes at rest."""
    for num_layers in (1, 2, 5):  # one or two stay in their slots, and are changed there again
        _stream_layers(num_layers, _AddsOne(at_once=True))


def layers_that_are_updated_later() -> None:
    """Repeat it with changes that are made at the next visit."""
    for num_layers in (1, 2, 5):
        _stream_layers(num_layers, _AddsOne(at_once=False))


def _stream_layers(num_layers: int, updates: _AddsOne) -> None:
    layers = [nn.Linear(COLUMNS, ROWS, bias=False) for _ in range(num_layers)]
    for layer in layers:
        nn.init.zeros_(layer.weight)
    slabs = [LayerSlab(layer, lambda _: True, _host(), torch.zeros_like) for layer in layers]
    stream = LayerStream(slabs, CopyEngine(DEVICE), DEVICE)
    stream.updates = updates
    for expected in (0, 1, 12, 13):
        for index, layer in enumerate(layers):
            stream.visit(index, then=index + 1, in_backward=False)
            assert layer.weight.detach().eq(expected).all()
            layer.weight.detach().sum()  # the host does not wait for this one
        for index in reversed(range(len(layers))):
            stream.visit(index, then=index - 1, in_backward=True)
            if updates.updates_at_once:
                updates.apply(slabs[index].parameters)
            updates.waiting.update([] if updates.updates_at_once else slabs[index].parameters)
        if expected == 1:
            stream.flush()
            for slab in slabs:
                slab.materialize()
                slab.parameters[0].data.add_(10)
                slab.evict()
            stream.forget()
    stream.flush()


def a_layer_that_nobody_comes_for() -> None:
    """End a forward early, and change on the host the layer that is being copied."""
    slabs = [LayerSlab(nn.Linear(COLUMNS, ROWS), lambda _: True, _host(), torch.zeros_like) for _ in range(3)]
    stream = LayerStream(slabs, CopyEngine(DEVICE), DEVICE)
    stream.visit(0, then=1, in_backward=False)
    stream.flush()
    slabs[1].memory.fill_(0)


def a_chunk_that_nobody_comes_for() -> None:
    """End an update of two chunks after the first."""
    home = HostStorage(_host())
    states = [home.allocate(64, torch.float32, DEVICE) for _ in range(NUM_SLOTS)]
    visits = home.visit([{"average": state} for state in states], DEVICE)
    next(visits)
    del visits
    home.synchronize()
    for state in states:
        state.fill_(0)


def a_tile_that_nobody_comes_for() -> None:
    """End the loss early: the next tile is being copied, and the next loss begins with the first."""
    linear = nn.Linear(COLUMNS, ROWS, bias=False)
    linear.weight = nn.Parameter(_host().allocate(linear.weight.shape, torch.float32, "parameter"))
    head = StreamedHead(linear, DEVICE, _host(), is_tied=False)
    for _ in range(2):
        head.weight(slice(0, 4))


def activations_sent_for_in_vain() -> None:
    """End backward early: activations being copied back are freed, and their memory is reused on both sides."""
    room = OffloadPool(_host(), 1)
    saved = [room.leave(torch.ones(1024) * count) for count in range(3)]
    assert room.back(saved.pop()).eq(2).all()
    del saved
    torch.ones(1024)
    assert room.back(room.leave(torch.ones(1024) * 3)).eq(3).all()


def activations_that_come_back() -> None:
    """Fetch activations one ahead of their use, twice in the same buffers."""
    room = OffloadPool(_host(), 2)
    for _ in range(2):
        saved = [room.leave(torch.ones(1024) * count) for count in range(5)]
        while saved:
            assert room.back(saved[-1]).eq(len(saved) - 1).all()
            saved.pop()


VISITS = (
    there_and_back,
    sources_on_their_way,
    memory_that_goes_while_it_is_copied,
    chunks_that_grow,
    rows_read_right_after_their_update,
    rows_of_one_batch_after_another,
    a_tied_gradient,
    a_tile_that_nobody_comes_for,
    a_layer_that_nobody_comes_for,
    a_chunk_that_nobody_comes_for,
    gradients_that_wait_for_their_norm,
    updates_beside_a_forward_pass,
    layers_that_are_updated_at_once,
    layers_that_are_updated_later,
    activations_sent_for_in_vain,
    activations_that_come_back,
)
