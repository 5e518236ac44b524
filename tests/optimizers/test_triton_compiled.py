"""The Triton kernel compiled for every generation of GPUs since Turing, without any of them."""

import functools

import pytest
from triton_kernel import AVERAGES, MASTERS, STATES
from triton_processes import run_with_triton

pytest.importorskip("triton", reason="there is no Triton for this system")

ARCHS = (75, 80, 89, 90, 100, 120)
"""Turing, on which no run takes it, to Blackwell."""

PROGRAM = """
import json, sys, triton_kernel
print(json.dumps([vars(triton_kernel.compiled(*job)) for job in json.loads(sys.argv[1])]))
"""


compiled = functools.partial(run_with_triton, interpret=False, TRITON_DEFAULT_FP_FUSION="1")


def check(jobs, folder):
    for job, found in zip(jobs, compiled(PROGRAM, folder, jobs), strict=True):
        assert found["spilled_bytes"] == 0, job
        assert found["registers"] <= 128, job  # four blocks of 128 threads and more on a multiprocessor
        assert found["fused"] == 0, job
        assert found["least_bytes"] <= found["moved_bytes"] <= 1.2 * found["least_bytes"], job


def test_adamw_with_the_compact_formats_and_with_averages_in_two(tmp_path):
    compact = [(arch, "adamw", "split24", ("8bit", "8bit")) for arch in ARCHS]
    mixed = [(90, "adamw", "split24", ("bf16", "fp32")), (80, "adamw", "split16", ("fp32", "8bit"))]
    check([*compact, *mixed], tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS)
def test_every_rule_and_format(arch, tmp_path):
    check(
        [(arch, rule, master, state) for rule in AVERAGES for master in MASTERS for state in STATES], tmp_path
    )


LAUNCHES = """
import json, sys
import torch
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import compute_cache_key, create_function_from_signature
from lowmem_ft.foundation.tensors.gradient_slice import GradientSlice
from lowmem_ft.optimizers import OPTIMIZERS, ChunkedOptimizer
from lowmem_ft.optimizers.triton.triton_kernel import update_chunk

backend = make_backend(GPUTarget("cuda", 90, 32))
specialised = create_function_from_signature(update_chunk.signature, update_chunk.params, backend)
variants, launches, fused = {}, 0, set()

def launch(*arguments, grid, warmup, **keywords):
    global launches
    launches += 1
    _, specialization, options = specialised(*arguments, **keywords)
    variants[compute_cache_key({}, specialization, options)] = None
    fused.add(backend.parse_options(options).enable_fp_fusion)

update_chunk.run = launch
name, state, master, models = json.loads(sys.argv[1])
row = OPTIMIZERS[name]

def launched(sizes):
    global launches
    variants.clear()
    fused.clear()
    launches = 0
    parameters = [nn.Parameter(torch.zeros(size, dtype=torch.bfloat16)) for size in sizes]
    defaults = {"lr": 1e-3, "weight_decay": 0.1, **row.hyperparameters}
    optimizer = ChunkedOptimizer(parameters, row.update_rule(), defaults, state=state, master=master, seed=1)
    optimizer.kernel, optimizer.chunk_elements = "untried", 768
    for step in range(4):
        optimizer.param_groups[0]["lr"] = 1e-3 * step
        for parameter in parameters:
            clip = torch.ones(7)[step]  # a number among others lies anywhere
            optimizer.update([GradientSlice(parameter, torch.zeros_like(parameter))], scale=clip)
    return launches, len(variants), sorted(fused)

print(json.dumps([launched(sizes) for sizes in models]))
"""


@pytest.mark.parametrize(
    "name,state,master",
    [("adamw", "8bit", "split24"), pytest.param("lion", "bf16", "split16", marks=pytest.mark.slow)],
)
def test_a_configuration_is_compiled_once(name, state, master, tmp_path):
    """And once more where a parameter does not end with a vector: keys, element, rate and step change nothing."""
    models = [2**14, 2048, 4096, 512], [2**14, 2048, 1, 701]
    found = compiled(LAUNCHES, tmp_path, [name, state, master, models])
    for (launches, num_variants, fused), expected in zip(found, (1, 2), strict=True):
        assert launches > 4 * 4
        assert num_variants == expected
        assert fused == [False]


ARGUMENTS = """
import json, sys
import torch
from measuring import stubbed_launches
from torch import nn
from triton.runtime.jit import JITFunction
from lowmem_ft.optimizers import OPTIMIZERS, ChunkedOptimizer
from lowmem_ft.optimizers.triton.triton_update import Launches, rule_in_kernel

launched, looked_up, run = [], [], JITFunction.run

def launch(self, *arguments):
    launched.append([one.data_ptr() if isinstance(one, torch.Tensor) else one for one in arguments])

def look_up(self, *arguments, **options):
    looked_up.append(self)
    return run(self, *arguments, **options)

stubbed_launches._Kernel.run, JITFunction.run = launch, look_up

def arguments_of(name, state, master, has_clip):
    row = OPTIMIZERS[name]
    parameter = nn.Parameter(torch.zeros(1024, dtype=torch.bfloat16))
    values = {"lr": 1e-3, "weight_decay": 0.1, **row.hyperparameters}
    optimizer = ChunkedOptimizer([parameter], row.update_rule(), values, state=state, master=master)
    optimizer.allocate_state()
    rule, names = rule_in_kernel(optimizer.rule, 1, values), optimizer.layout_of(parameter).in_kernel
    gradient, clip = torch.zeros_like(parameter), torch.ones(()) if has_clip else None
    launched.clear(), looked_up.clear()
    for _ in range(3):
        launches = Launches(rule, names, clip, gradient)
        launches.launch(parameter.detach(), gradient, optimizer.state[parameter], [5, 6, 7], 0)
    first, *others = launched
    return len(looked_up), [other == first for other in others]

with stubbed_launches.stubbed_launches():
    print(json.dumps([arguments_of(*job) for job in json.loads(sys.argv[1])]))
"""


def test_a_compiled_kernel_gets_the_arguments_that_triton_would_give_it(tmp_path):
    jobs = [
        ("adamw", "8bit", "split24", True),
        ("adamw", {"exp_avg": "bf16", "exp_avg_sq": "8bit"}, "fp32", False),
        ("lion", "8bit", "stochastic_rounding", True),
        ("sgd", "fp32", "none", False),
    ]
    assert compiled(ARGUMENTS, tmp_path, jobs) == [[1, [True, True]]] * len(jobs)
