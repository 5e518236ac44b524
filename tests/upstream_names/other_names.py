"""Names of Accelerate, PEFT, bitsandbytes, datasets, DeepSpeed, Triton, Liger and TRL."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from upstream_names.upstream_name import UpstreamName, called, data, each, replaced

ACCELERATE = (
    *data("accelerate.state.PartialState", "_shared_state", "its device is chosen again in a trace", "dict"),
    *data("accelerate.state.AcceleratorState", "_shared_state", "the same", "dict"),
    *data("accelerate.state.GradientState", "_shared_state", "the same", "dict"),
    called(
        "accelerate.state.AcceleratorState",
        "_reset_state",
        "",
        "of an Accelerator that has a precision",
    ),
    *data("accelerate.Accelerator().prepare()", "_is_accelerate_prepared", "its mark is taken off", "bool"),
    *data(
        "accelerate.Accelerator().prepare()", "_original_forward", "what it put around forward goes", "method"
    ),
)

PEFT = (
    replaced(
        "peft.tuners.lora.LoraLayer",
        "_get_base_layer_device_and_dtype",
        "self base_layer",
        "adapters are made in float32, not rounded to their layer's type",
    ),
    replaced(
        "peft.tuners.lora.LoraLayer", "_cast_input_dtype", "self x dtype", "leaves the type to autocast"
    ),
    *data(
        "peft.utils.transformers_weight_conversion",
        "_MODEL_TO_CONVERSION_PATTERN",
        "families whose experts it adapts",
        "dict",
    ),
    *data(
        "peft.utils.transformers_weight_conversion",
        "_MOE_TARGET_MODULE_MAPPING",
        "names that it takes for their experts and routers",
        "dict",
    ),
)

_FUNCTIONAL = "bitsandbytes.functional"

BITSANDBYTES = (
    *data(_FUNCTIONAL, "name2qmap", "tables kept for the process must not be fake", "dict"),
    *data(f"{_FUNCTIONAL}.GlobalPageManager", "_instance", "nor its pages"),
    replaced(
        _FUNCTIONAL, "create_dynamic_map", "signed max_exponent_bits total_bits", "reads the table it makes"
    ),
    replaced(_FUNCTIONAL, "get_paged", "shape dtype device", "asks CUDA for managed memory"),
    replaced(_FUNCTIONAL, "fill", "A value device prefetch", "calls CUDA by address"),
    replaced(_FUNCTIONAL, "prefetch_tensor", "A to_cpu", "calls CUDA by address"),
    replaced("bitsandbytes.optim.optimizer", "sync_gpu", "t", "waits for the device by CUDA's own call"),
    *each("called", "bitsandbytes.nn.Params4bit", "__new__", "takes fake tensors too"),
    *each("called", "bitsandbytes.nn.Int8Params", "__new__", "takes fake tensors too"),
    *each("module", "bitsandbytes.autograd", "_functions", "its logger is quiet"),
)

DATASETS = (*data("datasets.Dataset()", "_fingerprint", "the tokenized rows' place in the cache", "str"),)

DEEPSPEED = (
    *data(
        "deepspeed.utils.mixed_precision_linkage.link_hp_params()",
        "_hp_mapping",
        "where ZeRO-2 keeps a parameter's float32 values and averages",
        "tensor_fragment",
    ),
)


TRITON = (
    *data("triton.runtime.driver.driver", "_active", "a GPU is there without its driver"),
    replaced("triton.runtime.autotuner.Autotuner", "_bench", None, "configurations are not timed"),
    replaced(
        "liger_kernel.backends.capability.Capability",
        "_evaluate",
        None,
        "it finds Triton, without having it",
    ),
)


LIGER = (
    *data(
        "liger_kernel.transformers.monkey_patch",
        "MODEL_TYPE_TO_APPLY_LIGER_FN",
        "which of an architecture's modules get which operator",
        "dict",
    ),
    called(
        "liger_kernel.transformers.swiglu",
        "_swiglu_dispatch",
        "a b gate_multiplier down_multiplier",
        "the gated activation of an MLP, which may be differentiated once",
    ),
    *data("liger_kernel.transformers.geglu", "LigerGELUMulFunction", "the same with GELU"),
)


def _head_kernels(module: str) -> Iterator[UpstreamName]:
    yield replaced(module, "_use_triton", "device", "its way over Triton, without having it")
    yield replaced(module, "_addmm_fp32", "acc a b", "products that CUDA sums in float32")
    yield from data(module, "_MM_OUT_DTYPE", "whether it knows those products", "bool")
    yield from data(module, "_backward_kernel", "a pass over tiles of logits")


TRL = (
    replaced(
        "trl.trainer.grpo_trainer.GRPOTrainer",
        "_generate_single_turn",
        None,  # they differ between its versions
        "completions without generating them",
    ),
    *(
        dataclasses.replace(
            row, since=(1, 16)
        )  # lowmem_ft.virtual_gpu.upstream.trl_kernels follows none before
        for row in (
            *_head_kernels("trl.kernels.chunked_logprob"),
            *_head_kernels("trl.kernels.chunked_divergence"),
            replaced("trl.trainer.utils", "_use_triton", "device", "which positions are scored"),
            *data("trl.kernels.chunked_logprob", "_forward_kernel", "a pass over a tile of logits"),
            *data(
                "trl.kernels.chunked_divergence", "_stats_kernel _jsd_kernel", "passes over tiles of logits"
            ),
        )
    ),
    *data(
        "trl.trainer.utils",
        "_CHUNKED_LOGPROB_CHUNK_SIZE",
        "how wide a tile of logits is",
        "int",
        since=(1, 15),
    ),
    *data(
        "trl.trainer.sft_trainer",
        "_CHUNKED_LM_HEAD_CHUNK_SIZE",
        "how many tokens have logits at once",
        "int",
        before=(1, 15),
    ),
)
