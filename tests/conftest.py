"""Fixtures that several folders of tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # each core has a worker already
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder with slices of the published data sets, where there is one."""
    folder = Path(os.environ.get("GMA_BENCH_SHARED", ROOT.parent / "shared")) / "data"
    if not folder.is_dir():
        pytest.skip(f"no published data in {folder} (set GMA_BENCH_SHARED)")
    return folder


@pytest.fixture(scope="session")
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of prepared data for the whole session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def tiny(tmp_path: Path, cache_dir: Path) -> list[str]:
    """Overrides of a ListOps cell that trains in about a second, in a folder of its own."""
    return [
        "task=listops", "mixer=gma", "scale=smoke", "trainer=cpu", "logger=none",
        f"results_dir={tmp_path / 'results'}", f"cache_dir={cache_dir}",
        "task.num_train=200", "task.num_val=60", "task.num_test=70", "task.max_length=24",
        "training.steps=12", "training.batch_size=8", "training.evaluations=3",
        "training.log_every=1",
        "model.d_model=16", "model.num_layers=1", "model.dropout=0.1",
    ]  # fmt: skip


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A cell sets its own thread count; the next test should not inherit it."""
    import torch

    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)
