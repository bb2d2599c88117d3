"""Set before torch is imported: one thread, and kernels whose last bits do not depend on addresses."""

from __future__ import annotations

import os

# MKL otherwise picks its kernels by the alignment of the operands: on some tiny sizes (T5, d_ff 48) even two plain
# runs of the same step differ in the last bit, and no comparison to the bit would mean anything.
os.environ.setdefault("MKL_CBWR", "COMPATIBLE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

# the same examples in every run, and no judgement on the speed of a busy machine
settings.register_profile(
    "steady", derandomize=True, database=None, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("steady")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Tests of a group are kept together, so that what they share is set up once: not all versions do so."""
    if session.config.getoption("loadgroup", default=False):
        grouped = [item.nodeid for item in session.items if item.get_closest_marker("xdist_group")]
        if any("@" not in name for name in grouped):
            session.warn(pytest.PytestWarning("groups are not seen: take pytest and pytest-xdist of constraints.txt"))


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same seeds, in whatever order and process it runs, and leaves torch as it was."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    yield
    assert torch.is_grad_enabled(), "the test left gradients switched off"
    assert torch.get_default_dtype() is torch.float32, "the test left another default dtype"
    assert not torch.is_autocast_enabled("cpu"), "the test left autocast on"
