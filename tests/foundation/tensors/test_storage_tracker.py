"""The tracker counts exactly the bytes that are alive, wherever they were made."""

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker

KB = 1024  # bytes of a tensor of 256 fp32 numbers


def test_counts_creation_and_release():
    with StorageTracker() as tracker:
        a = torch.zeros(256)
        b = a + 1
        assert tracker.live_bytes == 2 * KB
        del a
        assert tracker.live_bytes == KB
    del b
    assert tracker.live_bytes == 0, "a storage that outlives the block is still released"
    assert tracker.peak_bytes == 2 * KB


def test_views_share_one_storage_until_the_last_goes():
    with StorageTracker() as tracker:
        a = torch.zeros(256)
        view = a.view(16, 16)[3:].t()
        del a
        assert tracker.live_bytes == KB
        del view
        assert tracker.live_bytes == 0


def test_storages_from_before_count_only_when_added():
    before = torch.zeros(256)
    with StorageTracker() as tracker:
        before.view(16, 16)
        before.add_(1)
        assert tracker.live_bytes == 0
        tracker.add(before)
        tracker.add(before[:1])
        assert tracker.live_bytes == KB
        del before
        assert tracker.live_bytes == 0


def test_tensors_made_from_python_numbers_count():
    with StorageTracker() as tracker:
        made = torch.tensor([0.0] * 256)
        assert tracker.live_bytes == made.nbytes


def test_peak_can_be_taken_by_phase():
    with StorageTracker() as tracker:
        a = torch.zeros(1024)
        del a
        tracker.reset_peak()
        assert tracker.peak_bytes == 0
        torch.zeros(256)
        assert tracker.peak_bytes == KB


def test_other_devices_do_not_count():
    with StorageTracker("meta") as tracker:
        on_cpu = torch.zeros(256)
        on_meta = torch.zeros(256, device="meta")
        assert tracker.live_bytes == KB
        del on_cpu
        assert tracker.live_bytes == on_meta.nbytes


def test_resized_storage_is_measured_again():
    with StorageTracker() as tracker:
        a = torch.zeros(256)
        a.resize_(512)
        assert tracker.live_bytes == 2 * KB
        del a
        assert tracker.live_bytes == 0


def test_gradients_and_optimizer_state_are_seen():
    layer = nn.Linear(16, 16, bias=False)
    optimizer = torch.optim.AdamW(layer.parameters(), foreach=False)
    with StorageTracker() as tracker:
        layer(torch.ones(4, 16)).sum().backward()
        assert tracker.live_bytes == KB, "the gradient of 16 x 16 fp32 weights"
        optimizer.step()
        step_counter = 4
        assert tracker.live_bytes == 3 * KB + step_counter
        optimizer.zero_grad(set_to_none=True)
        assert tracker.live_bytes == 2 * KB + step_counter


def test_kept_activations_and_recomputation_are_seen():
    layers = [nn.Sequential(nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 16)) for _ in range(4)]
    x = torch.ones(4, 16, requires_grad=True)
    kept, peak = {}, {}
    for recompute in (False, True):
        with StorageTracker() as tracker:
            h = x
            for layer in layers:
                h = (
                    checkpoint(layer, h, use_reentrant=False, preserve_rng_state=False)
                    if recompute
                    else layer(h)
                )
            kept[recompute] = tracker.live_bytes
            tracker.reset_peak()
            h.sum().backward()
            peak[recompute] = tracker.peak_bytes
        del h
    boundary, inside = 4 * 16 * 4, 2 * 4 * 256 * 4
    assert kept == {False: 4 * (boundary + inside), True: 4 * boundary}
    assert peak[True] > kept[True] + inside, "backward makes the activations of a layer again"


def test_fake_tensors_count_as_real_ones_do():
    def step():
        layer = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
        with StorageTracker() as tracker:
            loss = layer(torch.ones(4, 16)).square().mean()
            kept = tracker.live_bytes
            loss.backward()
            return kept, tracker.peak_bytes, tracker.live_bytes

    real = step()
    with FakeTensorMode(), torch.autograd.set_multithreading_enabled(False):
        fake = step()
    assert fake == real


def test_each_tensor_of_a_call_is_looked_at_wherever_it_is():
    """Several results, lists of them, and what is written into by name."""
    before = [torch.ones(4), torch.ones(8)]
    with StorageTracker() as tracker:
        several = torch.topk(before[1], 3)
        assert tracker.live_bytes == 3 * 4 + 3 * 8
        of_a_list = torch._foreach_add(before, 1)
        assert tracker.live_bytes == 3 * 4 + 3 * 8 + 4 * 4 + 8 * 4
        del several, of_a_list
        torch.add(before[0], before[0], out=before[1][:4])
        assert tracker.live_bytes == 0
