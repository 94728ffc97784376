"""A sealed checkpoint is a plain torch file, and any altered byte is noticed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gma_bench.train.checkpoints import DamagedCheckpoint, load_checkpoint, save_checkpoint, unseal

CONTENT = {"weights": torch.arange(12.0).reshape(3, 4), "step": 7, "curves": {"loss": [1.0, 0.5]}}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("checkpoint") / "x.ckpt"
    save_checkpoint(CONTENT, path)
    return path


def test_it_comes_back_and_torch_reads_it_too(path: Path) -> None:
    for loaded in (load_checkpoint(path), torch.load(path, weights_only=True)):
        assert torch.equal(loaded["weights"], CONTENT["weights"])
        assert loaded["curves"] == CONTENT["curves"]


@given(st.data())
@settings(max_examples=200, deadline=None)
def test_one_changed_byte_is_noticed(path: Path, data: st.DataObject) -> None:
    content = bytearray(path.read_bytes())
    content[data.draw(st.integers(0, len(content) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(DamagedCheckpoint):
        unseal(bytes(content))


@given(st.data())
@settings(max_examples=50, deadline=None)
def test_a_cut_is_noticed(path: Path, data: st.DataObject) -> None:
    content = path.read_bytes()
    with pytest.raises(DamagedCheckpoint):
        unseal(content[: data.draw(st.integers(0, len(content) - 1))])


def test_code_in_a_checkpoint_is_not_run(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, ...]:
            return (Path.touch, (tmp_path / "sprung",))

    save_checkpoint({"trap": Trap()}, tmp_path / "x.ckpt")
    with pytest.raises(Exception, match=r"weights_only|Weights only|Unsupported"):
        load_checkpoint(tmp_path / "x.ckpt")
    assert not (tmp_path / "sprung").exists()
