"""What every test gets: one thread per xdist worker, a fixed seed, and `gpu` tests skipped without a GPU."""

import os
import random

# xdist's workers share the cores; PyTorch's own threads would only fight over them. Set before torch is
# imported, so that the processes a test starts inherit it.
IS_WORKER = "PYTEST_XDIST_WORKER" in os.environ
if IS_WORKER:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import hypothesis  # noqa: E402
import pytest  # noqa: E402
import torch  # noqa: E402

if IS_WORKER:
    torch.set_num_threads(1)

# A first call may compile or import for seconds: a deadline per example would only measure the machine.
hypothesis.settings.register_profile("quintic", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("quintic")


@pytest.fixture(autouse=True)
def fixed_seed() -> int:
    """Seed Python's, NumPy's and PyTorch's generators alike before every test; returns the seed."""
    value = 0
    random.seed(value)
    torch.manual_seed(value)
    try:
        import numpy
    except ImportError:
        return value
    numpy.random.seed(value)
    return value


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this machine cannot run, and keep tests that share processes on one worker."""
    no_gpu = pytest.mark.skip(reason="needs a CUDA device")
    has_gpu = torch.cuda.is_available()
    one_worker = pytest.mark.xdist_group("distributed")
    for item in items:
        if item.get_closest_marker("gpu") and not has_gpu:
            item.add_marker(no_gpu)
        # tests/distributed starts a pool of processes once per worker: on one worker, it starts once.
        if config.pluginmanager.hasplugin("xdist") and "distributed" in item.path.parent.parts:
            item.add_marker(one_worker)
