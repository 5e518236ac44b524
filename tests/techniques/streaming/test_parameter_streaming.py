"""Streamed weights compute what resident ones do, and two layers of them live at a time."""

from __future__ import annotations

import contextlib
import copy
import itertools

import pytest
import torch
from measuring.families import FAMILIES
from tiny_models import model_of
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from lowmem_ft.foundation.errors import DoesNotFitError, ModelError, UserError
from lowmem_ft.foundation.host.copy_engine import CopyEvent
from lowmem_ft.foundation.host.pinned_memory import HostMemory
from lowmem_ft.foundation.tensors.storage_tracker import StorageTracker
from lowmem_ft.techniques.accumulation.vertical_accumulation import enable_vertical_accumulation
from lowmem_ft.techniques.checkpointing.checkpointed_layers import enable_checkpointing
from lowmem_ft.techniques.checkpointing.config import CheckpointingConfig
from lowmem_ft.techniques.loss.chunked_loss import LossConfig, enable_chunked_loss
from lowmem_ft.techniques.offload.config import OffloadConfig
from lowmem_ft.techniques.streaming.embedding import StreamedEmbedding
from lowmem_ft.techniques.streaming.parameter_streaming import enable_parameter_streaming
from lowmem_ft.techniques.tiling.config import TilingConfig
from lowmem_ft.virtual_gpu.device.placement import place_module
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

LAYERS = 5
CPU = torch.device("cpu")
STREAM = OffloadConfig(parameters="stream")
LEARNING_RATE = 0.05


def tiny_model(family="llama", seed=0, **fields):
    """One of the estimator's families: layers come and go by turns, so there must be more than two, of many kinds."""
    depth = {"n_layer": LAYERS} if family == "gpt2" else {"num_hidden_layers": LAYERS, "layer_types": None}
    fields = {"model_type": family, **FAMILIES[family], **depth, **fields}
    config = AutoConfig.for_model(**{key: value for key, value in fields.items() if value is not None})
    model = model_of(config, seed=seed)
    enable_checkpointing(model, CheckpointingConfig(mode="full"))
    return model


def ids_of(rows=2, tokens=16, seed=1):
    return torch.randint(3, 500, (rows, tokens), generator=torch.Generator().manual_seed(seed))


def loss_of(model, ids):
    torch.manual_seed(2)
    return model(input_ids=ids, labels=ids, use_cache=False).loss


class PlainUpdates:
    """Collects gradients, and takes a step of gradient descent: at once, or when it is told to."""

    def __init__(self, model, *, deferred=False, learning_rate=LEARNING_RATE):
        self.updates_at_once = not deferred
        self.beside, self.fork = contextlib.nullcontext, int  # a CPU has no streams
        self.learning_rate = learning_rate
        self.gradients = {}
        self.waiting = {}
        self.names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter in self.names:
            if parameter.requires_grad and parameter.device == parameter.data.device:
                parameter.register_post_accumulate_grad_hook(self._collect)

    def _collect(self, parameter):
        gradient, parameter.grad = parameter.grad, None
        self.take(parameter, gradient)

    def take(self, parameter, gradient, start=0):
        whole = self.gradients.setdefault(self.names[parameter], torch.full((parameter.numel(),), torch.nan))
        whole[start : start + gradient.numel()] = gradient.flatten()
        self.waiting.setdefault(parameter, []).append((gradient.clone().flatten(), start))
        if self.updates_at_once:
            self.apply([parameter])

    def written(self, parameter):
        return CopyEvent()  # the step is taken where the weight waits

    def defer(self, parameters):
        self.deferred_parameters = set(parameters)

    def has_deferred(self, parameters):
        return any(parameter in self.waiting for parameter in parameters)

    def apply(self, parameters):
        for parameter in parameters:
            for gradient, start in self.waiting.pop(parameter, []):
                flat = parameter.data.view(-1)[start : start + gradient.numel()]
                flat.sub_(gradient, alpha=self.learning_rate)


def streamed(model, config=STREAM, *, trained=True, deferred=False, loss=None, **updates):
    streaming = enable_parameter_streaming(
        model, config, device=CPU, host=HostMemory(CPU), trained=trained, loss=loss
    )
    if trained:
        streaming.update_with(PlainUpdates(model, deferred=deferred, **updates))
    return streaming


def plain_step(model, ids):
    loss = loss_of(model, ids)
    loss.backward()
    gradients = {name: parameter.grad.flatten() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(parameter.grad, alpha=LEARNING_RATE)
            parameter.grad = None
    return loss, gradients


def same(ours, theirs):
    assert ours.keys() == theirs.keys()
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_losses_gradients_and_weights_are_bitwise_those_of_a_resident_model(family, tied):
    plain = tiny_model(family, tie_word_embeddings=tied)
    model = copy.deepcopy(plain)
    streaming = streamed(model)
    for step in range(2):
        ids = ids_of(seed=step)
        stock, gradients = plain_step(plain, ids)
        loss = loss_of(model, ids)
        loss.backward()
        assert torch.equal(loss, stock)
        assert same(streaming.updates.gradients, gradients)
    streaming.remove()
    assert same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_updates_that_wait_are_made_at_the_layers_next_visit(tied):
    plain = tiny_model(tie_word_embeddings=tied)
    model = copy.deepcopy(plain)
    streaming = streamed(model, deferred=True)
    layers = set(model.model.layers.parameters())
    for step in range(3):
        ids = ids_of(seed=step)
        stock, _ = plain_step(plain, ids)
        loss = loss_of(model, ids)
        loss.backward()
        assert torch.equal(loss, stock)
        waiting = streaming.updates.waiting
        assert layers <= waiting.keys()
        streaming.updates.apply([parameter for parameter in waiting if parameter not in layers])
    streaming.flush()
    assert not streaming.updates.waiting
    with streaming.at_rest():
        assert same(model.state_dict(), plain.state_dict())


def test_two_layers_live_and_each_is_loaded_at_most_twice_a_step():
    model = tiny_model(tie_word_embeddings=False)
    layer_bytes = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    weights = {parameter: parameter.nbytes for parameter in model.model.layers.parameters()}
    with StorageTracker() as tracker:
        streaming = streamed(model, learning_rate=0.0)
        slots = streaming.layers.slot_bytes
        assert slots == 2 * layer_bytes
        before = tracker.live_bytes
        for step in range(3):
            loads = streaming.layers.num_loads
            loss_of(model, ids_of()).backward()
            streaming.updates.gradients.clear()
            taken = streaming.layers.num_loads - loads
            # The last two are there at the turn, and the first two at the next step.
            assert taken == 2 * LAYERS - (2 if step == 0 else 4)
            assert taken <= 2 * LAYERS - 1
        assert tracker.live_bytes == before
    storages = {parameter.untyped_storage()._cdata for parameter in weights}
    assert len(storages) <= 2, "outside its visit a parameter has no memory but one element for all"
    assert sum(
        parameter.untyped_storage().nbytes() for parameter in weights if parameter.stride(-1) == 0
    ) <= 4 * len(weights)


@pytest.mark.parametrize("stay, num_loads", [(2, (2 * 3 - 2) + (2 * 3 - 4)), (LAYERS, 0)])
def test_layers_that_stay_are_not_loaded(stay, num_loads):
    plain = tiny_model()
    model = copy.deepcopy(plain)
    streaming = streamed(model, OffloadConfig(parameters="stream", resident_layers=stay))
    for step in range(2):
        _, gradients = plain_step(plain, ids_of(seed=step))
        loss_of(model, ids_of(seed=step)).backward()
        assert same(streaming.updates.gradients, gradients)
    assert streaming.layers.num_loads == num_loads
    assert (streaming.layers.slot_bytes > 0) == (stay < LAYERS)


def test_evaluation_between_steps_changes_nothing():
    plain = tiny_model()
    model = copy.deepcopy(plain)
    streaming = streamed(model)
    for step in range(2):
        plain_step(plain, ids_of(seed=step))
        loss_of(model, ids_of(seed=step)).backward()
        with torch.no_grad():
            assert torch.equal(loss_of(model.eval(), ids_of(seed=7)), loss_of(plain.eval(), ids_of(seed=7)))
        model.train(), plain.train()
    streaming.remove()
    assert same(model.state_dict(), plain.state_dict())


def test_a_model_saved_in_the_middle_is_the_trained_one_and_training_goes_on(tmp_path):
    plain = tiny_model(tie_word_embeddings=True)
    model = copy.deepcopy(plain)
    streaming = streamed(model)
    for step in range(3):
        plain_step(plain, ids_of(seed=step))
        loss_of(model, ids_of(seed=step)).backward()
        with streaming.at_rest():
            model.save_pretrained(tmp_path / str(step))
        saved = AutoModelForCausalLM.from_pretrained(tmp_path / str(step))
        assert same(saved.state_dict(), plain.state_dict())


def test_saving_copies_no_weights():
    model = tiny_model()
    streaming = streamed(model)
    with streaming.at_rest():
        storages = [parameter.untyped_storage() for parameter in model.model.layers.parameters()]
        assert len({storage.data_ptr() for storage in storages}) == len(storages)
        assert all(
            storage.nbytes() == parameter.nbytes
            for storage, parameter in zip(storages, model.model.layers.parameters(), strict=True)
        )
        slabs = [
            (slab.memory.data_ptr(), slab.memory.data_ptr() + slab.memory.nbytes)
            for slab in streaming.layers.slabs
        ]
        assert all(any(start <= storage.data_ptr() < end for start, end in slabs) for storage in storages)


def test_padding_tokens_give_the_embedding_no_gradient():
    plain = tiny_model(tie_word_embeddings=False)
    ids = ids_of()
    ids[:, 10:] = plain.model.embed_tokens.padding_idx
    model = copy.deepcopy(plain)
    streaming = streamed(model)
    _, gradients = plain_step(plain, ids)
    loss_of(model, ids).backward()
    assert same(streaming.updates.gradients, gradients)
    assert streaming.updates.gradients["model.embed_tokens.weight"].view(503, -1)[0].count_nonzero() == 0


def test_the_embedding_hands_its_gradient_over_in_chunks(monkeypatch):
    monkeypatch.setattr("lowmem_ft.techniques.streaming.embedding._CHUNK_ELEMENTS", 100 * 64)
    plain = tiny_model(tie_word_embeddings=True)
    model = copy.deepcopy(plain)
    streaming = streamed(model)
    parts, take = [], streaming.updates.take

    def watched(parameter, gradient, start=0):
        parts.append((start, len(gradient)))
        take(parameter, gradient, start)

    streaming._embedding.train_with(watched, CopyEvent)
    _, gradients = plain_step(plain, ids_of())
    loss_of(model, ids_of()).backward()
    assert same(streaming.updates.gradients, gradients)
    assert parts == [(start * 64, min(100, 503 - start)) for start in range(0, 503, 100)]
    assert all(start % 256 == 0 for start, _ in parts)


@pytest.mark.parametrize("checkpointing", ["full", "none"])
def test_a_frozen_base_streams_under_resident_adapters(checkpointing):
    peft = pytest.importorskip("peft")

    def with_adapter(model):
        torch.manual_seed(3)
        config = peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        adapted = peft.get_peft_model(model, config)
        if checkpointing == "none":
            for layer in model.model.layers:
                layer.gradient_checkpointing = False
        return adapted

    plain, model = with_adapter(tiny_model()), with_adapter(tiny_model())
    streaming = streamed(model, trained=False)
    optimizers = [
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=LEARNING_RATE)
        for m in (plain, model)
    ]
    for step in range(3):
        losses = []
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            for micro_batch in range(2):  # adapters accumulate as ever
                losses.append(loss_of(each, ids_of(seed=2 * step + micro_batch)))
                losses[-1].backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[:2] == losses[2:]
    assert all(
        p.device == CPU and p.untyped_storage().nbytes() == p.nbytes
        for p in model.parameters()
        if p.requires_grad
    )
    streaming.remove()
    assert same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("bits", [4, 8])
def test_a_quantised_base_streams_as_packed_bytes(bits):
    peft = pytest.importorskip("peft")
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def quantised():
        model = tiny_model(hidden_size=64, intermediate_size=128).bfloat16()
        for layer in model.model.layers:
            for name, linear in list(layer.named_modules()):
                if isinstance(linear, torch.nn.Linear):
                    layer.set_submodule(name, packed(bitsandbytes, linear, bits))
        torch.manual_seed(3)
        return peft.get_peft_model(
            model, peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)
        )

    plain, model = quantised(), quantised()
    layer_bytes = sum(
        p.nbytes for p in model.base_model.model.model.layers[0].parameters() if not p.requires_grad
    )
    streaming = streamed(model, trained=False)
    assert streaming.layers.slot_bytes < 2 * 1.3 * layer_bytes
    for step in range(3):
        losses = [loss_of(each, ids_of(seed=step)) for each in (plain, model)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    adapters = [[p.grad for p in each.parameters() if p.requires_grad] for each in (plain, model)]
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(*adapters, strict=True))
    streaming.remove()
    assert torch.equal(loss_of(plain, ids_of()), loss_of(model, ids_of()))


@pytest.mark.parametrize("bits", [4, 8])
def test_biases_of_a_quantised_base_stay_as_bitsandbytes_casts_them(bits):
    """In float32 until the first forward under autocast; a layer's recomputation must find them as its forward did."""
    bitsandbytes = pytest.importorskip("bitsandbytes")

    def quantised():
        model = tiny_model("qwen2", hidden_size=64)
        for layer in model.model.layers:
            for name in ("q_proj", "k_proj", "v_proj"):
                layer.set_submodule(
                    f"self_attn.{name}", packed(bitsandbytes, getattr(layer.self_attn, name), bits)
                )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        enable_checkpointing(model, CheckpointingConfig(mode="selective"))
        enable_vertical_accumulation(model, 1)
        return model

    plain, model = quantised(), quantised()
    streaming = streamed(model, trained=False)
    for step in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            losses = [loss_of(each, ids_of(rows=3, seed=step)) for each in (plain, model)]
        for loss in losses:
            loss.backward()
        assert torch.equal(*losses)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(*map(trained, (plain, model)), strict=True))
    streaming.remove()
    assert same(model.state_dict(), plain.state_dict())


def trained(model):
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def packed(bitsandbytes, linear, bits):
    has_bias = linear.bias is not None
    if bits == 4:
        new = bitsandbytes.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            bias=has_bias,
            compute_dtype=torch.bfloat16,
            quant_type="nf4",
            compress_statistics=True,
        )
        new.weight = bitsandbytes.nn.Params4bit(
            linear.weight.data, requires_grad=False, quant_type="nf4", compress_statistics=True
        )
    else:
        new = bitsandbytes.nn.Linear8bitLt(
            linear.in_features, linear.out_features, bias=has_bias, has_fp16_weights=False
        )
        new.weight = bitsandbytes.nn.Int8Params(
            linear.weight.data, requires_grad=False, has_fp16_weights=False
        )
    new.bias = linear.bias
    new = new.to("cpu")
    new.support_avx512bf16_for_cpu = False
    return new


@pytest.mark.parametrize("tiles", [1, 3])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_the_chunked_loss_takes_the_head_tile_by_tile(tied, tiles):
    plain = tiny_model(tie_word_embeddings=tied)
    model = copy.deepcopy(plain)
    config, tiling = LossConfig(chunk_tokens=8), TilingConfig(head=tiles)
    enable_chunked_loss(plain, config, tiling)
    loss = enable_chunked_loss(model, config, tiling)
    streaming = streamed(model, loss=loss)
    for step in range(2):
        stock, gradients = plain_step(plain, ids_of(seed=step))
        ours = loss_of(model, ids_of(seed=step))
        ours.backward()
        assert torch.equal(ours, stock)
        assert same(streaming.updates.gradients, gradients)
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids_of()).logits, plain(input_ids=ids_of()).logits)
        assert torch.equal(loss_of(model, ids_of()), loss_of(plain, ids_of()))
    streaming.remove()
    assert torch.equal(loss_of(model, ids_of()), loss_of(plain, ids_of()))


def test_more_layers_than_there_are_cannot_stay():
    with pytest.raises(UserError, match=r"offload\.resident_layers must be at most 5, .* got 6"):
        streamed(tiny_model(), OffloadConfig(parameters="stream", resident_layers=6))


def test_a_model_without_decoder_layers_is_refused_with_the_key():
    with pytest.raises(ModelError, match=r"offload\.parameters=device"):
        streamed(torch.nn.Linear(2, 2))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_in_one_tensor_need_checkpointing(family):
    """Autograd would keep slices of a slot in which another layer visits by then."""
    with torch.device("meta"):
        model = tiny_model(family)
    enable_checkpointing(model, CheckpointingConfig(mode="full", skip_last_layers=1))
    with VirtualGPU("a100-80gb") as gpu:
        place_module(model, CPU, lambda name, tensor: None)
        host = HostMemory(gpu.device, is_limited=False)
        with pytest.raises(
            ModelError, match=r"slices of one tensor \(mlp\.experts\..*checkpointing\.mode=full"
        ):
            enable_parameter_streaming(model, STREAM, device=gpu.device, host=host, trained=False)
        config = OffloadConfig(parameters="stream", resident_layers=1)
        enable_parameter_streaming(model, config, device=gpu.device, host=host, trained=False)


def test_too_little_host_memory_is_refused():
    host = HostMemory(CPU, budget_bytes=1)
    with pytest.raises(DoesNotFitError, match=r"offload\.parameters=stream needs .* more host memory"):
        enable_parameter_streaming(tiny_model(), STREAM, device=CPU, host=host, trained=True)


class TracedUpdates(PlainUpdates):
    """On fake tensors, whose device cannot change: gradients are let go."""

    def take(self, parameter, gradient, start=0):
        self.gradients[self.names[parameter]] = gradient.device.type


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_it_is_traced_on_the_virtual_gpu(tied):
    with torch.device("meta"):
        model = tiny_model(tie_word_embeddings=tied)
    with VirtualGPU("a100-80gb") as gpu:
        place_module(model, CPU, lambda name, tensor: None)
        host = HostMemory(gpu.device, is_limited=False)
        streaming = enable_parameter_streaming(model, STREAM, device=gpu.device, host=host, trained=True)
        # Beside the slots: the last norm, the rotary frequencies (twice), one element that all weights away show.
        assert gpu.recorder.live_bytes == streaming.layers.slot_bytes + 64 * 4 + 2 * 8 * 4 + 4
        streaming.update_with(TracedUpdates(model))
        for _ in range(2):
            ids = torch.zeros(2, 16, dtype=torch.int64)
            streaming.before_forward(ids, None)
            loss_of(model, ids.to(gpu.device)).backward()
    assert streaming.layers.num_loads == (2 * LAYERS - 2) + (2 * LAYERS - 4)
    assert len(streaming.updates.gradients) == LAYERS * 9 + (2 if tied else 3)
    assert set(streaming.updates.gradients.values()) == {"vgpu"}
    waiting = host.bytes_by_category["parameter"]
    assert streaming.host_bytes <= waiting < streaming.host_bytes + 4096 * (LAYERS + 2)


def test_the_host_does_not_wait_for_the_device_to_send_the_rows_of_a_frozen_embedding():
    with VirtualGPU("a100-80gb") as gpu:
        table = nn.Embedding.from_pretrained(torch.ones(64, 1024))
        embedding = StreamedEmbedding(
            table, gpu.device, HostMemory(gpu.device, is_limited=False), lambda: None
        )
        ids_BT = torch.zeros(2, 64, dtype=torch.long)
        arrived_BT = ids_BT.to(gpu.device)
        begin = len(gpu.work.entries)
        embedding.expect(ids_BT)
        table(arrived_BT)
        entries = list(itertools.islice(gpu.work.entries, begin, None))
    assert any(entry.num_bytes == 2 * 64 * 1024 * 4 for entry in entries)
    assert not any(entry.blocking for entry in entries)
