"""What is recorded of a kernel's sizes, and the kind it is taken to be."""

import pytest
import torch

from lowmem_ft.virtual_gpu.calls.kernel_kinds import kind_of
from lowmem_ft.virtual_gpu.costs.flops import flops_of
from lowmem_ft.virtual_gpu.costs.shapes import shape_of

aten = torch.ops.aten


def t(*shape):
    return torch.randn(shape)


def sizes(func, *args):
    result = func(*args)
    return shape_of(func, args, {}, result, flops_of(func, args, {}, result))


def test_a_product_is_recorded_with_its_rows_columns_and_inner_dimension():
    assert sizes(aten.mm.default, t(3, 4), t(4, 5)) == (1, 3, 5, 4)
    assert sizes(aten.bmm.default, t(2, 3, 4), t(2, 4, 5)) == (2, 3, 5, 4)
    assert sizes(aten.addmm.default, t(5), t(3, 4), t(4, 5)) == (1, 3, 5, 4)
    assert sizes(aten.mv.default, t(3, 4), t(4)) == (1, 1, 3, 4)
    assert sizes(aten.mul.Tensor, t(3), t(3)) == ()


@pytest.mark.parametrize("is_causal", [True, False])
def test_attention_is_recorded_with_the_keys_of_a_query(is_causal):
    func = aten._scaled_dot_product_flash_attention.default
    query = torch.empty(2, 3, 64, 16, device="meta")
    args = (query, query, query, 0.0, is_causal)
    flops = flops_of(func, args, {}, None)
    assert shape_of(func, args, {}, None, flops) == (6, 64, 32 if is_causal else 64, 16)


def test_a_convolution_is_recorded_with_its_groups():
    def of(groups, weight):
        args = (t(1, 4, 9), weight, None, [1], [0], [1], False, [0], groups)
        return sizes(aten.convolution.default, *args)

    assert of(1, t(6, 4, 3)) == (1, 4, 6)
    assert of(4, t(4, 1, 3)) == (4, 1, 1)


@pytest.mark.parametrize(
    "name, shape, has_products, by_triton, kind",
    [
        ("mm", (1, 2, 2, 2), True, False, "products"),
        ("_varlen_attn", (1, 2, 2, 2), True, False, "attention"),
        ("_flash_attention_backward", (1, 2, 2, 2), True, False, "attention backward"),
        ("convolution", (1, 8, 8), True, False, "dense convolutions"),
        ("convolution_backward", (8, 1, 1), True, False, "depthwise convolutions"),
        ("convolution", (2, 8, 8), True, False, "grouped convolutions"),
        ("_rms_norm_forward_kernel", (), False, True, "fused kernels"),
        ("_swiglu_backward_kernel", (), False, True, "fused backward kernels"),
        ("liger_cross_entropy_kernel", (), False, True, "cross entropy"),
        ("update_in_triton", (), False, True, "updates"),
        ("_fused_adamw_", (), False, False, "updates"),
        ("dequantize_4bit", (), False, False, "unpacking"),
        ("embedding", (), False, False, "lookups"),
        ("_log_softmax_backward_data", (), False, False, "reductions"),
        ("mul", (), False, False, "element-wise"),
    ],
)
def test_each_operator_has_a_kind(name, shape, has_products, by_triton, kind):
    assert kind_of(name, shape, has_products=has_products, by_triton=by_triton) == kind
