"""Liger's kernels compiled for the GPUs that take them, and its transcriptions compared with Triton's interpreter.

The interpreter runs rotary embeddings as they are. It knows no functions of CUDA's device library, and no method of a
number: the norms' ``rsqrt``, GEGLU's ``tanh`` and the ``.to`` of numbers get one there; all else is the kernels' own.
"""

import pytest
from triton_processes import run_with_triton

pytest.importorskip("liger_kernel", reason="Liger needs Triton, which this system has not")
pytest.importorskip("triton", reason="there is no Triton for this system")

COMPILED = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from liger_kernel.ops import geglu, rms_norm, rope, swiglu

WIDTH, BLOCK = 1024, 1024
ROWS = {"n_cols": "i32", "n_rows": "i32", "eps": "fp32", "offset": "fp32", "rows_per_program": "i32"}
NORM = {"casting_mode": 0, "elementwise_affine": True, "BLOCK_SIZE": BLOCK, "COMPUTE_DW": True}
HEAD = {**NORM, "BLOCK_SIZE": 128, "BLOCK_ROW": 16}
GATE = {"n_cols": WIDTH, "BLOCK_SIZE": BLOCK}
HEADS = {"bs": 1, "cos_bs": 1, "n_qh": 32, "n_kh": 8, "hd": 128, "pad_n_qh": 32, "pad_n_kh": 8, "pad_hd": 128}
HEADS |= {"pad_rd": 128, "rd": 128, "BLOCK_SIZE": 32}
JOBS = [
    (rms_norm._rms_norm_forward_kernel, NORM), (rms_norm._rms_norm_backward_kernel, {**NORM, "casting_mode": 1}),
    (rms_norm._block_rms_norm_forward_kernel, HEAD), (rms_norm._block_rms_norm_backward_kernel, HEAD),
    (swiglu._swiglu_forward_kernel, GATE), (swiglu._swiglu_backward_kernel, GATE),
    (geglu._geglu_tanh_forward_kernel, GATE), (geglu._geglu_tanh_backward_kernel, GATE),
    (rope._triton_rope, {**HEADS, "BACKWARD_PASS": False}), (rope._triton_rope, {**HEADS, "BACKWARD_PASS": True}),
]
FLOATS = {"RSTD_ptr", "dW_ptr"}
POINTERS = {"a", "b", "c", "dc", "cos", "sin"}

def type_of(name, constants):
    if name in constants:
        return "constexpr"
    if name == "X_dtype":
        return "constexpr"
    if name in FLOATS:
        return "*fp32"
    if name.endswith("_ptr") or name in POINTERS:
        return "*bf16"
    return ROWS.get(name, "fp32" if name.endswith("multiplier") else "i32")

found = []
arch = json.loads(sys.argv[1])
for kernel, constants in JOBS:
    names = [parameter.name for parameter in kernel.params]
    constants = {name: value for name, value in constants.items() if name in names}
    if "X_dtype" in names:
        constants["X_dtype"] = triton.language.bfloat16
    types = {name: type_of(name, constants) for name in names}
    source = ASTSource(
        kernel, signature=types, constexprs={(names.index(name),): value for name, value in constants.items()}
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options={"num_warps": 8})
    found.append([kernel.fn.__name__, len(compiled.asm["cubin"])])
print(json.dumps(found))
"""

INTERPRETED = """
import json, sys
import torch
import triton.language as tl
from liger_kernel.ops import LigerGELUMulFunction, LigerRMSNormFunction, LigerRopeFunction, LigerSiLUMulFunction
from liger_kernel.ops import geglu, rms_norm, rope, swiglu
from transcribed_liger import TRANSCRIPTIONS, transcribed_kernels
from triton.runtime.interpreter import InterpretedFunction

class Number(float):
    def to(self, dtype):
        return self

rms_norm.rsqrt = lambda x: 1 / tl.sqrt(x)
geglu.tanh = lambda x: 1 - 2 / (tl.exp(2 * x) + 1)
run, ran = InterpretedFunction.run, set()

def run_with_numbers(kernel, *args, **kwargs):
    ran.add(kernel.fn.__name__)
    numbers = lambda value: Number(value) if type(value) is float else value
    return run(kernel, *map(numbers, args), **{name: numbers(value) for name, value in kwargs.items()})

InterpretedFunction.run = run_with_numbers
generator = torch.Generator().manual_seed(0)

def drawn(*shape, dtype):
    return torch.randn(*shape, generator=generator).to(dtype)

def norm(offset, mode):
    return lambda x, weight: LigerRMSNormFunction.apply(x * 1, weight, 1e-6, offset, mode, True)

def turn(q, k, angles):
    return LigerRopeFunction.apply((q * 1).transpose(1, 2), (k * 1).transpose(1, 2), angles.cos(), angles.sin())

def cases(dtype):
    yield "llama's norm", norm(0.0, "llama"), [drawn(5, 48, dtype=dtype), drawn(48, dtype=dtype)]
    yield "gemma's norm", norm(1.0, "gemma"), [drawn(5, 48, dtype=dtype), drawn(48, dtype=dtype)]
    gated = [drawn(5, 40, dtype=dtype) for _ in range(2)]
    yield "swiglu", lambda a, b: LigerSiLUMulFunction.apply(a * 1, b * 1), gated
    yield "geglu", lambda a, b: LigerGELUMulFunction.apply(a * 1, b * 1), gated
    angles = drawn(1, 3, 4, dtype=dtype).repeat(1, 1, 2)
    heads = [drawn(2, 3, num, 8, dtype=dtype) for num in (4, 2)]
    yield "rotary", lambda q, k: turn(q, k, angles), heads

def both_passes(function, inputs):
    leaves = [one.clone().requires_grad_() for one in inputs]
    outputs = function(*leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    torch.autograd.backward(outputs, [torch.full_like(one, 0.5) for one in outputs])
    return [one.detach() for one in outputs] + [leaf.grad for leaf in leaves]

found = []
for dtype in (torch.float32, torch.float16):  # it has no bfloat16 for a masked load
    for name, function, inputs in cases(dtype):
        interpreted = both_passes(function, inputs)
        with transcribed_kernels():
            transcribed = both_passes(function, inputs)
        off = max(
            ((one.double() - other.double()).norm() / one.double().norm()).item()
            for one, other in zip(interpreted, transcribed)
        )
        found.append([name, str(dtype), off / torch.finfo(dtype).eps])
print(json.dumps([found, sorted(ran), sorted(TRANSCRIPTIONS)]))
"""


@pytest.mark.parametrize("arch", [80, *(pytest.param(arch, marks=pytest.mark.slow) for arch in (89, 90))])
def test_every_kernel_is_compiled_for_the_gpus_that_take_it(arch, tmp_path):
    from transcribed_liger import TRANSCRIPTIONS

    found = dict(run_with_triton(COMPILED, tmp_path, arch, interpret=False))
    assert found.keys() == TRANSCRIPTIONS.keys()
    assert all(size > 0 for size in found.values())


def test_transcriptions_compute_what_the_interpreter_does(tmp_path):
    found, ran, transcribed = run_with_triton(INTERPRETED, tmp_path, interpret=True)
    assert set(transcribed) - set(ran) == {
        "_block_rms_norm_forward_kernel",  # for 32768 rows, which the interpreter would take one by one
        "_block_rms_norm_backward_kernel",
    }
    for name, dtype, roundings in found:
        assert roundings < 4, (name, dtype)
