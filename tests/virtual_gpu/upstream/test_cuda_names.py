"""Every public name of ``torch.cuda`` answers for the virtual GPU or says that it cannot, in our words."""

from __future__ import annotations

import importlib
import inspect
import re

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention
from torch.utils._device import _device_constructors

from lowmem_ft.foundation.devices import is_virtual, kernels_of
from lowmem_ft.foundation.errors import UserError
from lowmem_ft.virtual_gpu.device.device import VirtualBackend
from lowmem_ft.virtual_gpu.gpu import VirtualGPU

MIB = 2**20


@pytest.fixture
def gpu():
    with VirtualGPU("a100-80gb") as gpu:
        yield gpu


ARGUMENTS = {
    "can_device_access_peer": lambda: (0, 0),
    "caching_allocator_alloc": lambda: (8,),
    "caching_allocator_delete": lambda: (8,),
    "change_current_allocator": lambda: (None,),
    "check_error": lambda: (0,),
    "CudaError": lambda: None,  # an exception, which only the runtime makes
    "CUDAPluggableAllocator": lambda: ("a", "b", "c"),
    "device": lambda: ("cuda",),
    "device_of": lambda: (torch.ones(1, device="cuda"),),
    "export_dot": lambda: ("graph.dot",),
    "export_graph_data": lambda: ("graph.json",),
    "ExternalStream": lambda: (8,),
    "get_stream_from_external": lambda: (8,),
    "graph": lambda: (None,),
    "make_graphed_callables": lambda: (nn.Identity(), ()),
    "manual_seed": lambda: (0,),
    "manual_seed_all": lambda: (0,),
    "set_device": lambda: (0,),
    "set_per_process_memory_fraction": lambda: (1.0,),
    "set_rng_state": lambda: (torch.cuda.get_rng_state(),),
    "set_rng_state_all": lambda: (torch.cuda.get_rng_state_all(),),
    "set_stream": lambda: (torch.cuda.current_stream(),),
    "set_sync_debug_mode": lambda: ("warn",),
    "stream": lambda: (torch.cuda.Stream(),),
    "StreamContext": lambda: (torch.cuda.Stream(),),
    "use_mem_pool": lambda: (None,),
}

REFUSED = {
    *("BFloat16Storage", "BoolStorage", "ByteStorage", "CharStorage", "ComplexDoubleStorage", "LongStorage"),
    *("ComplexFloatStorage", "DoubleStorage", "FloatStorage", "HalfStorage", "IntStorage", "ShortStorage"),
    *("current_blas_handle", "current_solver_handle", "cudart", "check_error", "get_stream_from_external"),
    *("ExternalStream", "caching_allocator_alloc", "caching_allocator_delete", "GreenContext"),
    *("CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables"),
    *("MemPool", "use_mem_pool", "change_current_allocator", "CUDAPluggableAllocator"),
    *("caching_allocator_enable", "caching_allocator_disabled", "memory_snapshot", "list_gpu_processes"),
    *("utilization", "temperature", "power_draw", "clock_rate", "memory_usage", "device_memory_used"),
    *("host_memory_stats", "host_memory_stats_as_nested_dict", "reset_peak_host_memory_stats"),
    "reset_accumulated_host_memory_stats",
}


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_each_public_name_works_or_says_that_it_cannot(gpu):
    refused, broken = set(), {}
    for name in sorted(set(torch.cuda.__all__)):
        value = getattr(torch.cuda, name)
        arguments = ARGUMENTS.get(name, tuple)()
        if not callable(value) or arguments is None:
            continue
        try:
            value(*arguments)
        except UserError as error:
            refused |= set(re.findall(r"has no torch\.cuda\.(\w+)\. ", str(error)))
        except BaseException as error:
            broken[name] = error
    assert not broken
    assert refused == REFUSED & set(torch.cuda.__all__)


REFUSED_OF = {
    **dict.fromkeys(("nvtx", "profiler", "jiterator", "graphs", "memory"), REFUSED),
    **dict.fromkeys(("comm", "nccl", "tunable"), None),
    "accelerator": {"get_device_capability"},
}
"""Functions of submodules that may say that they cannot; None: each of them."""


@pytest.mark.filterwarnings("ignore::FutureWarning")  # deprecated ones are public as well
@pytest.mark.parametrize("name", REFUSED_OF)
def test_functions_of_submodules_work_or_say_that_they_cannot(name, gpu):
    module = torch.accelerator if name == "accelerator" else importlib.import_module(f"torch.cuda.{name}")
    public = getattr(module, "__all__", None) or [one for one in dir(module) if not one.startswith("_")]
    refused, broken = set(), {}
    for function_name in public:
        function = getattr(module, function_name)
        if not inspect.isroutine(function):
            continue
        try:
            function()
        except UserError:
            refused.add(function_name)
        except TypeError as error:
            if "required positional" not in str(error):
                broken[function_name] = error
        except BaseException as error:
            broken[function_name] = error
    assert not broken
    if REFUSED_OF[name] is not None:
        assert refused <= REFUSED_OF[name]


def elapsed(**options):
    first, second = (torch.cuda.Event(**options) for _ in range(2))
    first.record()
    return first.elapsed_time(second)


STRICT = [
    (lambda: torch.cuda.set_device("cuda"), ValueError, "with a specified index"),
    (lambda: torch.cuda.set_device(torch.device("vgpu")), ValueError, "with a specified index"),
    (lambda: torch.cuda.set_per_process_memory_fraction(0.5, "cuda"), ValueError, "with a specified index"),
    (lambda: torch.cuda.set_per_process_memory_fraction(2.0), ValueError, "Allowed range: 0~1"),
    (lambda: torch.cuda.set_per_process_memory_fraction(1), TypeError, "must be `float`"),
    (lambda: torch.cuda.memory_allocated("cpu"), ValueError, "Expected a cuda device, but got: cpu"),
    (lambda: torch.cuda.get_device_properties(3), UserError, "got cuda:3"),
    (lambda: torch.cuda.set_device(1), UserError, "got cuda:1"),
    (lambda: torch.cuda.synchronize("cuda:1"), UserError, "got cuda:1"),
    (lambda: torch.cuda.device("cuda:2"), UserError, "got cuda:2"),
    (lambda: torch.Generator("cuda:2"), UserError, "got cuda:2"),
    (lambda: torch.cuda.Stream("cuda:2"), UserError, "got cuda:2"),
    (lambda: torch.cuda.Stream("cpu"), ValueError, "Expected a cuda device, but got: cpu"),
    (lambda: torch.cuda.set_rng_state(torch.zeros(16)), TypeError, "must be a torch.ByteTensor"),
    (lambda: torch.cuda.set_rng_state(torch.get_rng_state()), RuntimeError, "RNG state is wrong size"),
    (lambda: torch.cuda.get_rng_state("cuda:1"), UserError, "got cuda:1"),
    (lambda: torch.cuda.manual_seed("one"), ValueError, "invalid literal for int"),
    (lambda: elapsed(enable_timing=False), ValueError, "created with argument 'enable_timing=True'"),
    (lambda: elapsed(enable_timing=True), ValueError, "must be recorded before calculating elapsed time"),
    (
        lambda: torch.cuda.set_sync_debug_mode("loud"),
        RuntimeError,
        "expected one of `default`, `warn`, `error`",
    ),
    (lambda: torch.cuda.set_sync_debug_mode(3), RuntimeError, "expected one of 0,1,2"),
    (
        lambda: torch.cuda.get_device_properties().uuid,
        AttributeError,
        "no property uuid; it knows name, major",
    ),
    (lambda: torch.cuda.current_stream().cuda_stream, UserError, "has no address"),
    (lambda: torch.cuda.GreenContext.create(8), UserError, "no torch.cuda.GreenContext"),
]


@pytest.mark.parametrize("call, error, message", STRICT)
def test_what_cuda_checks_is_checked(call, error, message, gpu):
    with pytest.raises(error, match=message):
        call()


OTHER_ARGUMENTS = {
    "device": 0,
    "peer_device": 0,
    "fraction": 0.5,
    "new_state": torch.zeros(16, dtype=torch.uint8),
}
DEMAND_AN_INDEX = {
    ("can_device_access_peer", "peer_device"),
    *((f"{verb}_per_process_memory_fraction", "device") for verb in ("get", "set")),
    ("set_device", "device"),
}


def functions_of_a_device():
    """Functions of torch.cuda that take a device, as torch has them, and which of their arguments it is."""
    for name in sorted({*torch.cuda.__all__, *torch.cuda.memory.__all__} & set(dir(VirtualBackend))):
        function = getattr(torch.cuda, name)
        taken = inspect.signature(function).parameters if inspect.isfunction(function) else ()
        for parameter in {"device", "peer_device"}.intersection(taken):
            yield (
                name,
                function,
                parameter,
                {key: OTHER_ARGUMENTS[key] for key in {*taken} & {*OTHER_ARGUMENTS}},
            )


def refusal_of(function, arguments):
    """What it says of the device; empty: it takes it, and asks the driver."""
    try:
        function(**arguments)
    except ValueError as error:
        return str(error)
    except (AttributeError, AssertionError, TypeError, RuntimeError):
        return ""  # there is no driver, and no current device
    return ""


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_an_index_is_demanded_where_torchs_own_function_demands_it(monkeypatch):
    for module in (torch.cuda, torch.cuda.memory):
        monkeypatch.setattr(module, "_lazy_init", lambda: None)
    functions = list(functions_of_a_device())
    assert len(functions) > 20
    demanded = set()
    for name, real, parameter, others in functions:
        refusal = refusal_of(real, {**others, parameter: "cuda"})
        with VirtualGPU("l4"):
            virtual = getattr(torch.cuda, name)
            assert virtual is not real
            assert refusal_of(virtual, {**others, parameter: "cuda"}) == refusal, name
            virtual(**{**others, parameter: 0})
        if refusal:
            demanded.add((name, parameter))
    assert demanded == DEMAND_AN_INDEX


def test_by_either_name_the_device_is_virtual_in_the_block_alone():
    with VirtualGPU("l4") as gpu:
        assert is_virtual("cuda")
        assert is_virtual(gpu.device)
        assert kernels_of("cuda") == kernels_of(gpu.device) == "cuda"
        assert not is_virtual("cpu")
    assert not is_virtual("cuda")


def test_devices_may_be_named_in_all_ways(gpu):
    for device in (None, 0, "cuda", "cuda:0", torch.device("cuda"), gpu.device, "vgpu"):
        assert torch.cuda.get_device_name(device) == gpu.spec.full_name
        with torch.cuda.device(device):
            torch.cuda.synchronize(device)
    torch.cuda.set_device(gpu.device)


def test_counters_are_those_of_the_caching_allocator(gpu):
    before = torch.cuda.memory_stats()
    torch.cuda.reset_peak_memory_stats()
    large, small = torch.empty(3 * MIB, dtype=torch.uint8, device="cuda"), torch.empty(100, device="cuda")
    stats = torch.cuda.memory_stats()
    assert (
        stats["allocated_bytes.large_pool.current"] - before["allocated_bytes.large_pool.current"] == 3 * MIB
    )
    assert stats["allocated_bytes.small_pool.current"] - before["allocated_bytes.small_pool.current"] == 512
    assert stats["requested_bytes.small_pool.current"] - before["requested_bytes.small_pool.current"] == 400
    assert stats["allocation.all.allocated"] - before["allocation.all.allocated"] == 2
    assert torch.cuda.memory_reserved() % (2 * MIB) == 0
    assert torch.cuda.memory_reserved() >= 20 * MIB
    del large, small
    after = torch.cuda.memory_stats()
    assert after["allocated_bytes.all.current"] == before["allocated_bytes.all.current"]
    assert after["allocated_bytes.all.peak"] == before["allocated_bytes.all.current"] + 3 * MIB + 512
    assert after["allocated_bytes.all.freed"] - before["allocated_bytes.all.freed"] == 3 * MIB + 512
    nested = torch.cuda.memory_stats_as_nested_dict()
    assert nested["reserved_bytes"]["all"]["current"] == torch.cuda.memory_reserved()


def test_a_memory_summary_is_torchs(gpu):
    weight = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
    summary = torch.cuda.memory_summary()
    assert "PyTorch CUDA memory summary, device ID 0" in summary
    assert f"{weight.nbytes // 1024} KiB" in next(
        line for line in summary.splitlines() if "Allocated memory" in line
    )


def test_inference_mode_takes_what_no_grad_takes():
    def bytes_of(mode) -> tuple[int, int]:
        with VirtualGPU("l4") as gpu:
            model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)).cuda()
            with mode():
                scores = model(torch.randn(4, 64, device="cuda"))
                assert not scores.requires_grad
                assert scores.sum().item() == 0.0
            assert model(torch.randn(4, 64, device="cuda")).requires_grad
        return gpu.recorder.peak_bytes, len(gpu.work.entries)

    assert bytes_of(torch.inference_mode) == bytes_of(torch.no_grad)


def test_inference_mode_nests_and_ends(gpu):
    @torch.inference_mode()
    def doubled(values):
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), values * 2

    assert doubled(torch.ones(2, device="cuda"))[:2] == (True, False)
    with torch.inference_mode():
        with torch.inference_mode(False):
            assert torch.is_grad_enabled()
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    assert not torch.is_inference_mode_enabled()


def test_flex_attention_says_what_to_take(gpu):
    query_BNTD = torch.randn(1, 2, 16, 8, device="cuda")
    with pytest.raises(UserError, match=r"FlexAttention .* \(`attn_implementation='sdpa'`"):
        flex_attention.flex_attention(query_BNTD, query_BNTD, query_BNTD)


def test_a_block_mask_is_made_and_printed(gpu):
    mask = flex_attention.create_block_mask(lambda b, h, q, kv: q >= kv, 1, 1, 256, 256, device=gpu.device)
    assert "shape=(1, 1, 256, 256)" in str(mask)


def test_a_kernel_that_waits_takes_no_memory(gpu):
    before = torch.cuda.memory_allocated()
    torch.cuda._sleep(1000)
    assert torch.cuda.memory_allocated() == before


def test_the_state_of_the_generator_has_the_size_that_cudas_has(gpu):
    state = torch.cuda.get_rng_state()
    assert (state.shape, state.dtype, state.device.type) == ((16,), torch.uint8, "cpu")
    torch.cuda.set_rng_state(state)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", "vgpu", torch.device("cuda", 0)], ids=str)
def test_a_generator_of_cuda(device, gpu):
    generator = torch.Generator(device=device).manual_seed(3)
    assert isinstance(generator, torch.Generator)
    assert generator.device == gpu.device
    generator.set_state(generator.get_state())
    assert torch.randn(3, device="cuda", generator=generator).shape == (3,)
    assert sorted(torch.randperm(4, device="cuda", generator=generator).shape) == [4]
    assert torch.multinomial(torch.ones(4, device="cuda"), 2, generator=generator).shape == (2,)
    assert torch.cuda.default_generators[0].initial_seed() is not None


def test_a_generator_of_the_host_is_real(gpu):
    generator = torch.Generator().manual_seed(3)
    assert type(generator) is type(torch.default_generator)
    assert isinstance(torch.default_generator, torch.Generator)


def test_streams_by_any_name(gpu):
    stream = torch.Stream(device="cuda")
    assert isinstance(stream, torch.cuda.Stream)
    with stream:
        assert torch.cuda.current_stream() == stream
        assert torch.accelerator.current_stream() == stream
        assert not stream.is_capturing()
    assert (stream.stream_id != 0, stream.device_index, stream.device_type) == (True, 0, 1)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    with torch.cuda.StreamContext(stream):
        torch.Event(device="cuda").record()
        assert torch.cuda.current_stream() == stream


def test_typed_tensors(gpu):
    values = torch.cuda.LongTensor([3, 4])
    assert (values.dtype, values.device.type, values.tolist()) == (torch.int64, "vgpu", [3, 4])
    assert torch.cuda.FloatTensor(2, 3).shape == (2, 3)
    assert isinstance(values, torch.cuda.LongTensor)
    assert not isinstance(values, torch.cuda.FloatTensor)
    assert torch.zeros(2).type("torch.cuda.HalfTensor").dtype == torch.float16
    assert torch.zeros(2).type(torch.cuda.HalfTensor).device.type == "vgpu"
    assert torch.zeros(2).type(torch.int32).dtype == torch.int32
    assert torch.zeros(2).type() == "torch.FloatTensor"


def test_torch_is_as_before():
    names = ("Generator", "Stream", "Event", "is_inference_mode_enabled")
    before = [getattr(torch, name) for name in names]
    with VirtualGPU("t4"):
        assert torch.Generator is not before[0]
    assert [getattr(torch, name) for name in names] == before


@pytest.mark.parametrize("content", [np.ones(3), np.float32(3), torch.ones(3), [1.0, 2.0]], ids=repr)
@pytest.mark.parametrize(
    "make", [torch.tensor, torch.as_tensor, torch.asarray], ids=lambda make: make.__name__
)
@pytest.mark.filterwarnings("ignore:To copy construct from a tensor")
def test_arrays_are_made_on_the_device_by_any_name(make, content, gpu):
    make = getattr(torch, make.__name__)  # that of the block
    for device in ("cuda", "cuda:0", torch.device("cuda"), gpu.device):
        assert make(content, device=device).device == gpu.device
    assert torch.ones(1).new_tensor(np.ones(3), device="cuda").device == gpu.device
    assert make(content).device.type == "cpu"


def test_a_default_device_means_torchs_own_functions_after_the_block():
    _device_constructors.cache_clear()  # as in a process that has asked nothing yet
    with VirtualGPU("l4"), torch.device("cuda"):
        assert torch.tensor([1.0]).device.type == "vgpu"
    with torch.device("meta"):
        assert torch.tensor([1.0]).is_meta
