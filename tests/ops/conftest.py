# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest
import torch
from ops.backends import BACKENDS, DEVICE_BACKENDS, Backend


@pytest.fixture(autouse=True)
def _fixed_seed():
    torch.manual_seed(0)


@pytest.fixture
def _restored_threads():
    """For tests that set torch's number of threads."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture(params=BACKENDS)
def backend(request):
    """Each place that an op runs in."""
    return Backend(request.param)


@pytest.fixture(params=DEVICE_BACKENDS)
def device_backend(request):
    """Each place that the CUDA kernels run in."""
    return Backend(request.param)


@pytest.fixture(params=[name for name in BACKENDS if name != "cuda"])
def host_backend(request):
    """Each place whose memory is the CPU's: for tensors that are huge and hardly touched."""
    return Backend(request.param)
