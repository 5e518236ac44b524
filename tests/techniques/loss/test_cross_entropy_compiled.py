"""The loss's Triton kernel compiled for every generation of GPUs that takes it, without any of them."""

import itertools

import pytest
from triton_processes import run_with_triton

pytest.importorskip("triton", reason="there is no Triton for this system")

ARCHS = (80, 86, 89, 90, 100, 120)

PROGRAM = """
import json, re, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton_kernel import usage
from lowmem_ft.techniques.loss.triton.triton_kernel import BLOCK, OPTIONS, cross_entropy_row

def compiled(arch, dtype, statistics, gradient, options):
    constants = dict.fromkeys(("CAPS", "SMOOTHS", "HAS_FACTOR"), options)
    constants |= {"WITH_STATISTICS": statistics, "WITH_GRADIENT": gradient, "BLOCK": BLOCK}
    types = {"logits": "*" + dtype, "row_stride": "i32", "num_columns": "i32", "labels": "*i64", "first": "i32"}
    types |= dict.fromkeys(("log_sums", "targets", "factor_on_device"), "*fp32")
    types |= dict.fromkeys(("factor", "scale", "cap", "label_share", "spread"), "fp32")
    types |= dict.fromkeys(constants, "constexpr")
    names = [parameter.name for parameter in cross_entropy_row.params]
    assert names == list(types)
    source = ASTSource(
        cross_entropy_row,
        signature=types,
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in ("logits", "row_stride", "num_columns")},
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=OPTIONS).asm["ptx"]
    vectors = [len(re.findall(rf"\\b{kind}\\.global\\.v4\\.b32", ptx)) for kind in ("ld", "st")]
    return [*usage(ptx, arch), *(16 * 32 * OPTIONS["num_warps"] * number / BLOCK for number in vectors)]

print(json.dumps([compiled(*job) for job in json.loads(sys.argv[1])]))
"""

WIDTHS = {"bf16": 2, "fp16": 2, "fp32": 4}
PARTS = [(True, True), (True, False), (False, True)]
"""With statistics, with gradient."""

QUICK = [(arch, "bf16", True, True, options) for arch, options in itertools.product(ARCHS, (False, True))]
ALL = itertools.product(ARCHS, WIDTHS, PARTS, (False, True))


@pytest.mark.parametrize(
    "jobs",
    [
        QUICK,
        pytest.param(
            [(arch, dtype, *parts, options) for arch, dtype, parts, options in ALL], marks=pytest.mark.slow
        ),
    ],
    ids=["bf16 in one pass", "all"],
)
def test_it_spills_nothing_and_moves_each_logit_in_vectors_once_a_pass(jobs, tmp_path):
    for job, found in zip(jobs, run_with_triton(PROGRAM, tmp_path, jobs, interpret=False), strict=True):
        _, dtype, statistics, gradient, _ = job
        registers, spilled, read, written = found
        assert spilled == 0, job
        assert registers <= 64, job  # four blocks of 256 threads on a multiprocessor
        assert read == WIDTHS[dtype] * (statistics + gradient), job
        assert written == WIDTHS[dtype] * gradient, job
