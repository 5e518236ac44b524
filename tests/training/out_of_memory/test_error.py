"""Running out of device memory ends with what to change, not with a traceback."""

from __future__ import annotations

import pytest
import torch
from gpu_runs import running_out_while_loading

from lowmem_ft.foundation.errors import DoesNotFitError
from lowmem_ft.foundation.out_of_memory_errors import LIBRARY_BYTES, library_that_did_not_start
from lowmem_ft.foundation.system.host_memory import MemoryReading
from lowmem_ft.foundation.units import GIB
from lowmem_ft.training.out_of_memory.error import does_not_fit, is_out_of_memory
from lowmem_ft.training.run import loop
from lowmem_ft.training.run.loop import train

MEMORY = MemoryReading(now_bytes=2**30, peak_bytes=3 * 2**30)


def out_of_memory(*_):
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_the_error_names_what_the_recipe_has_not_done_yet(tiny):
    bare = does_not_fit(
        tiny("loss.chunk_tokens=null", "checkpointing.mode=none", "data.max_length=1024"), MEMORY, "at step 1"
    )
    assert "ran out at step 1, after a peak of 3.00 GiB" in str(bare)
    for way_out in (
        "loss.chunk_tokens=1024",
        "training.per_device_train_batch_size=1 training.gradient_accumulation_steps=8",
        "training.mixed_precision=bf16",
        "checkpointing.mode=full",
        "model.dtype=bfloat16 optimizer.master=split16",
        "optimizer.state=8bit",
        "offload.optimizer=host",
        "data.max_length",
    ):
        assert way_out in str(bare)
    assert bare.exit_code == 3


def test_a_card_without_bfloat16_is_told_of_float16(tiny):
    message = str(does_not_fit(tiny("adapter.name=lora"), MEMORY, "at step 1", has_bfloat16=False))
    assert "training.mixed_precision=fp16 model.dtype=float16" in message
    assert "bf" not in message


def test_what_is_done_already_is_not_suggested(tiny):
    lean = tiny(
        "training.per_device_train_batch_size=1",
        "model.dtype=bfloat16",
        "optimizer.master=split24",
        "optimizer.state=8bit",
        "tiling.head=8",
        "data.max_length=128",
    )
    message = str(does_not_fit(lean, MEMORY, "at step 1"))
    assert "offload.optimizer=host" in message
    for done in (
        "chunk_tokens",
        "per_device",
        "split",
        "checkpointing",
        "state=",
        "tiling",
        "max_length",
    ):
        assert done not in message


def test_layers_that_a_recipe_leaves_out_are_offered(tiny):
    assert "checkpointing.every_n_layers=1" in str(
        does_not_fit(tiny("checkpointing.every_n_layers=2"), MEMORY, "")
    )


def test_a_run_that_runs_out_says_so_with_the_budget(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.Retries, "train_step", out_of_memory)
    with pytest.raises(DoesNotFitError, match=r"after 0 steps \(budget\.device=1TiB\)") as raised:
        train(tiny("budget=1TiB", output_dir=tmp_path / "run"))
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)


def test_a_run_that_runs_out_while_it_loads_says_what_is_asked_of_it_on_a_gpu(tiny, tmp_path, monkeypatch):
    """The words that a test for a device waits for, which runs where one is."""

    monkeypatch.setattr(loop.TrainingRun, "build", out_of_memory)
    with running_out_while_loading("1TiB"):
        train(tiny("budget=1TiB", output_dir=tmp_path / "run"))


def test_an_allocation_that_a_cpu_refuses_is_told_likewise(tiny, tmp_path, monkeypatch):
    def beyond_memory(retries, window):
        return torch.empty(2**60, dtype=torch.uint8)

    monkeypatch.setattr(loop.Retries, "train_step", beyond_memory)
    with pytest.raises(DoesNotFitError, match=r"The device memory ran out after 0 steps"):
        train(tiny(output_dir=tmp_path / "run"))


def test_tensors_without_a_storage_are_not_counted_when_it_runs_out(tiny, tmp_path, monkeypatch):
    sparse = torch.eye(3).to_sparse()

    monkeypatch.setattr(loop.Retries, "train_step", out_of_memory)
    with pytest.raises(DoesNotFitError, match=r"Largest tensors: "):
        train(tiny(output_dir=tmp_path / "run"))
    assert sparse.is_sparse


def test_other_errors_of_torch_are_not_taken_for_it(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.Retries, "train_step", lambda retries, window: torch.ones(2) @ torch.ones(3))
    with pytest.raises(RuntimeError, match="size"):
        train(tiny(output_dir=tmp_path / "run"))


def test_what_others_hold_of_the_device_is_said(tiny, tmp_path, monkeypatch, cuda_driver):
    driver = cuda_driver()
    monkeypatch.setattr(loop.TrainingRun, "build", out_of_memory)
    recipe = tiny("training.use_cpu=false", output_dir=tmp_path / "run")
    with pytest.raises(DoesNotFitError) as alone:
        train(recipe)
    assert "other processes" not in str(alone.value)
    driver.bytes["others"] = 30 * 2**30
    with pytest.raises(DoesNotFitError, match=r"plus [\d.]+ GiB that other processes hold \(nvidia-smi"):
        train(recipe)


def test_one_of_several_processes_is_told_nothing_that_works_in_one_only(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr(loop.TrainingRun, "build", out_of_memory)
    recipe = tiny(output_dir=tmp_path / "run")
    for world_size, is_told in (("1", True), ("2", False)):
        monkeypatch.setenv("WORLD_SIZE", world_size)
        with pytest.raises(DoesNotFitError, match="while the model was loaded") as raised:
            train(recipe)
        for one_process_only in ("in_backward", "offload.parameters=stream"):
            assert (one_process_only in str(raised.value)) == is_told
        assert "optimizer.state=8bit" in str(raised.value)


OUT_OF_MEMORY = [
    torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 7.65 GiB"
    ),
    torch.AcceleratorError(
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported", 2
    ),
    RuntimeError(
        "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable device-side assertions."
    ),
    RuntimeError("CUDA driver error: out of memory"),
    RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    RuntimeError("cusolver error: CUSOLVER_STATUS_ALLOC_FAILED, when calling `cusolverDnCreate(handle)`"),
    RuntimeError("Triton Error [CUDA]: out of memory"),
    RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
    RuntimeError(
        "NCCL error in: ProcessGroupNCCL.cpp:1691, unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL "
        "version 2.21.5\nncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\n"
        "Failed to CUDA calloc async 608 bytes"
    ),
    RuntimeError(
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 2 'out of memory'"
    ),
    RuntimeError(
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 'out of memory'"
    ),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to "
        "allocate 1152921504606846976 bytes. Error code 12 (Cannot allocate memory)"
    ),
    RuntimeError(
        "[enforce fail at alloc_cpu.cpp:83] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8."
    ),
    MemoryError("Unable to allocate 7.28 TiB for an array with shape (1000000, 1000000)"),
]
SOMETHING_ELSE = [
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx(...)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError(
        "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nCuda failure 1 'invalid argument'"
    ),
    RuntimeError("out of resource: shared memory, Required: 163840, Hardware limit: 101376."),  # Triton's
    RuntimeError(
        "DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's workers are out of "
        "shared memory. Please try to raise your shared memory limit."
    ),
    RuntimeError(
        "ncclSystemError: System call (e.g. socket, malloc) or external library call failed or device error.\nLast "
        "error:\nError while creating shared memory segment /dev/shm/nccl-Kw4oXT (size 5767520)"
    ),
    RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
    ValueError("CUDA error: out of memory"),
    OSError(28, "No space left on device"),
    DoesNotFitError("A host tensor (activation) needs 3.00 GiB more host memory"),
]


@pytest.mark.parametrize("error", OUT_OF_MEMORY, ids=lambda error: str(error)[:60])
def test_what_says_that_memory_ran_out_is_known_for_it(error):
    assert is_out_of_memory(error)


@pytest.mark.parametrize("error", SOMETHING_ELSE, ids=lambda error: str(error)[:60])
def test_what_sounds_like_it_is_not_taken_for_it(error):
    assert not is_out_of_memory(error)


NOT_STARTED = [
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasLtCreate(&handle)`"),
    RuntimeError("cuDNN error: CUDNN_STATUS_NOT_INITIALIZED"),
    RuntimeError(
        "cusolver error: CUSOLVER_STATUS_NOT_INITIALIZED, when calling `cusolverDnCreate(handle)`. If you keep seeing "
        "this error, you may use `torch.backends.cuda.preferred_linalg_library()`"
    ),
    RuntimeError(
        "NCCL error in: /pytorch/torch/csrc/distributed/c10d/NCCLUtils.cpp:94, unhandled cuda error (run with "
        "NCCL_DEBUG=INFO for details), NCCL version 2.29.7\nncclUnhandledCudaError: Call to CUDA function failed.\n"
        "Last error:\n"
    ),
]


@pytest.mark.parametrize("error", NOT_STARTED, ids=lambda error: str(error)[:60])
def test_a_library_that_cannot_start_lacks_memory_if_the_device_has_none_left(error, cuda_driver):
    driver = cuda_driver(total_memory=80 * GIB)
    driver.hold(60 * GIB, 80 * GIB - LIBRARY_BYTES)  # 20 GiB are cached, which is nothing to a library
    assert is_out_of_memory(error)
    assert library_that_did_not_start(error) is None


@pytest.mark.parametrize("error", NOT_STARTED, ids=lambda error: str(error)[:60])
def test_one_that_has_room_is_broken(error, cuda_driver):
    driver = cuda_driver(total_memory=80 * GIB)
    driver.hold(60 * GIB, 68 * GIB)
    assert not is_out_of_memory(error)
    said = library_that_did_not_start(error)
    assert said is not None
    assert "not because of memory: 12.0 GiB of the device are free" in said


def test_one_whose_driver_does_not_answer_is_broken():
    """As here, where there is no CUDA."""
    assert not is_out_of_memory(NOT_STARTED[0])
    assert "(CUBLAS_STATUS_NOT_INITIALIZED). The driver" in str(library_that_did_not_start(NOT_STARTED[0]))


@pytest.mark.parametrize("error", [*OUT_OF_MEMORY, *SOMETHING_ELSE], ids=lambda error: str(error)[:60])
def test_of_no_other_error_a_library_is_said_to_be_broken(error):
    assert library_that_did_not_start(error) is None
