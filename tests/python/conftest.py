"""Where the tests find their modules, the seed of what is random, and the mark of the tests that need torch."""

import os
import random
import sys
from pathlib import Path

import hypothesis
import hypothesis.core
import numpy as np
import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent / "oracle")]

import ingot_ctypes

# The Python package of the same build; `pip install` is test_package_install's matter.
sys.path.insert(0, str(Path(ingot_ctypes.PATH).parent / "python"))

SEED = int(os.environ.get("INGOT_TEST_SEED") or random.SystemRandom().randrange(2**32))
hypothesis.core.global_force_seed = SEED
hypothesis.settings.register_profile(
    "ingot", deadline=None, print_blob=True, database=None, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("ingot")


def pytest_configure(config):
    config.addinivalue_line("markers", "torch: needs torch or jax (tests/requirements-torch.txt)")
    config.addinivalue_line("markers", "images: needs nvcc and compiles GPU kernels")


def pytest_report_header():
    return f"INGOT_TEST_SEED={SEED}, library {ingot_ctypes.PATH}"


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"to repeat what was random: INGOT_TEST_SEED={SEED}")


@pytest.fixture
def rng(request):
    """A generator of this test's own."""
    return np.random.default_rng([SEED, *request.node.nodeid.encode()])
