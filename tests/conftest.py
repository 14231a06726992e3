"""What one test sets for the whole process, the next must not find. Tests run two at a time, see the Makefile."""

import os

# Threads that wait by spinning would take the core from the other half of the tests.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
import torch._dynamo


@pytest.fixture(autouse=True)
def _settings_stay():
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    onednn, benchmark = torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark
    deterministic, dtype = torch.are_deterministic_algorithms_enabled(), torch.get_default_dtype()
    convolutions = torch.backends.mkldnn.conv.fp32_precision
    recompiles = torch._dynamo.config.recompile_limit
    yield
    torch._dynamo.config.recompile_limit = recompiles
    torch.backends.mkldnn.conv.fp32_precision = convolutions
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(matmul)
    torch.backends.mkldnn.enabled, torch.backends.cudnn.benchmark = onednn, benchmark
    torch.use_deterministic_algorithms(deterministic)
    torch.set_default_dtype(dtype)
