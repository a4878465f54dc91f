"""Triton's kernels compile for Hopper without a GPU: what the interpreter cannot see.

An argument of 1 is a constant to the compiler, so the smallest shapes are compiled too.
"""

import os
import subprocess
import sys

import pytest

pytest.importorskip("triton", reason="needs triton, from the extra [cuda]")

SCRIPT = r"""
import re, sys
import torch
from longspan.attention import tiles
from longspan.attention.tiles import Compiled
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

class Hopper:
    get_current_target = lambda self: GPUTarget("cuda", 90, 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=0: 0

driver.set_active(Hopper())
tiles.enter = lambda device: None
launch, compiled = JITFunction.run, []

def compile_only(self, *args, grid, warmup=False, **options):
    kernel = launch(self, *args, grid=grid, warmup=True, **options)
    assert kernel.metadata.shared <= 227 * 1024, (self.__name__, kernel.metadata.shared)
    assert kernel.asm["cubin"]
    # What `tiles.Compiled` hands over is what the code asks for.
    entry = re.search(r"\.entry.*?\((.*?)\)", kernel.asm["ptx"], re.S)[1]
    kernel.function = 1
    assert len(Compiled(kernel, self.arg_names, args).run.values) == entry.count(".param")
    compiled.append(self.__name__)
    return kernel

JITFunction.run = compile_only
Compiled.launch = lambda *_: None

method, batch, tokens, channels, few, dtype = sys.argv[1:]
batch, tokens, channels, few = (int(x) for x in (batch, tokens, channels, few))
dtype = getattr(torch, dtype)
q, k, v = (torch.randn(batch, batch, tokens, channels).to(dtype) for _ in range(3))
mask = torch.ones(batch, tokens, dtype=torch.bool) if batch > 1 else None
if method == "yoso_expectation":
    from longspan.attention.yoso import expectation_triton as verbs
    y, inverse = verbs.sum_values(q, verbs.unit_rows(k), v, 8, True, "ieee")
    verbs.gradients(v, q, k, v, y, inverse, 8, True, True, "ieee")
elif method == "yoso":
    from longspan.attention.yoso import triton as verbs
    first = torch.zeros(batch, batch, few, 5, dtype=torch.int32)
    lists = torch.zeros(batch, batch, few, tokens, dtype=torch.int16), first
    for kind in (dtype, torch.float32):
        rows = [x.to(kind) for x in (q, k, v, v)]
        verbs.outer_sums(*rows, mask, lists, lists, 0.5, few, 1 << 20)
        verbs.through_unit(rows[0], rows[1], verbs.norms(rows[1], mask))
elif method == "nystrom":
    from longspan.attention.nystrom import kernels
    for original in (False, True):
        y, *saved = kernels.nystrom_forward(q, k, v, mask, few, 2, original, 0.1, True)
        kernels.nystrom_backward(v, q, k, v, mask, y, *saved, 2, original, 0.1)
elif method == "linformer":
    from longspan.attention.linformer import kernels
    e = torch.randn(few, tokens).to(dtype)
    y, *saved = kernels.linformer_forward(q, k, v, e, e, mask, 0.1)
    kernels.linformer_backward(v, q, k, v, e, e, mask, y, *saved, 0.1, True)
elif method == "convolution":
    from longspan.attention.convolution import kernels
    weight = torch.randn(batch, 1, 2 * few + 1, 1)
    kernels.convolution_forward(v, v, weight, mask)
    kernels.convolution_backward(v, v, weight, mask)
else:
    from longspan.attention.window import triton as verbs
    y, lse = verbs.attend(q, k, v, mask, few, 0.1)
    verbs.gradients(v, q, k, v, mask, y, lse, few, 0.1)
print(len(compiled))
"""

SHAPES = {
    "ones": (1, 1, 1, 1, "bfloat16"),
    "masked": (2, 40, 64, 16, "bfloat16"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["yoso", "yoso_expectation", "nystrom", "linformer", "window", "convolution"]
)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_every_kernel_compiles(method, shape, tmp_path):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-c", SCRIPT, method, *map(str, shape)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    assert int(run.stdout) >= 3
