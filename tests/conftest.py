"""What every test shares: one thread, one seed, and that only fast tests run unless marks are named."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import pytest
import torch
from hypothesis import settings

torch.set_num_threads(1)
torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
settings.register_profile("tangents", deadline=None, derandomize=True, database=None)
settings.load_profile("tangents")


def pytest_configure(config):
    if not config.option.markexpr:
        config.option.markexpr = "not slow and not gpu"


@pytest.fixture(autouse=True)
def same_seed_for_every_test():
    torch.manual_seed(0)
