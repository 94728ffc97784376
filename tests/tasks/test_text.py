"""Text: that what is fed is what the files say, and that faulty files are named with their row."""

from __future__ import annotations

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from gma_bench.errors import SettingError, UserError
from tasks import sources
from tasks.sources import hub_source
from tasks.text import SPLITS, Text, proportional_order


def write_folder(folder: Path, train: int = 40, test: int = 12, **columns: Any) -> Path:
    """A folder in the hub's layout with balanced classes and texts of many lengths."""
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in (("train", train), ("test", test)):
        rows = {
            "text": [f"{split} {i} " + "é" * (i % 7) + "x" * (11 * i % 50) for i in range(size)],
            "label": [i % 2 for i in range(size)],
        }
        pd.DataFrame({**rows, **columns}).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


def make(tmp_path: Path, **settings: Any) -> Text:
    task = Text(cache_dir=tmp_path / "cache", **settings)
    task.prepare_data()
    task.setup()
    return task


def documents(task: Text, split: str) -> list[tuple[bytes, int]]:
    return [(bytes(text), label) for text, label in task.data[split]]  # type: ignore[misc]


def test_every_document_is_fed_once_as_its_bytes(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    task = make(tmp_path, data_dir=str(folder), max_length=1000)
    train = pd.read_parquet(folder / "train-00000-of-00001.parquet")
    written = {(text.encode(), label) for text, label in zip(train.text, train.label, strict=True)}
    assert set(documents(task, "train")) | set(documents(task, "val")) == written
    assert len(task.data["train"]) + len(task.data["val"]) == len(written)
    assert task.classes == ["0", "1"]


def test_data_replaced_at_the_same_size_and_time_are_new_data(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    path = folder / "train-00000-of-00001.parquet"
    before, stamp = make(tmp_path, data_dir=str(folder), max_length=1000), path.stat()
    labels = dict(documents(before, "train"))
    frame = pd.read_parquet(path)
    frame.assign(label=1 - frame.label).to_parquet(path)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert (path.stat().st_size, path.stat().st_mtime_ns) == (stamp.st_size, stamp.st_mtime_ns)
    after = make(tmp_path, data_dir=str(folder), max_length=1000)
    assert after.fingerprint != before.fingerprint
    flipped = dict(documents(after, "train"))
    shared = labels.keys() & flipped.keys()
    assert shared
    assert all(flipped[text] == 1 - labels[text] for text in shared)


def test_batches_hold_shifted_bytes_padding_and_mask(tmp_path: Path) -> None:
    task = make(tmp_path, data_dir=str(write_folder(tmp_path / "data")), max_length=1000)
    batch = task.collate([task.data["test"][i] for i in range(5)])
    for i in range(5):
        text, label = task.data["test"][i]
        row, mask = batch["tokens"][i], batch["mask"][i]
        assert (row[mask] - 1).tolist() == list(bytes(text))
        assert (row[~mask] == 0).all()
        assert batch["target"][i] == label
    assert batch["tokens"].max() < task.vocab_size
    assert batch["mask"].sum(1).max() == batch["tokens"].shape[1]


def test_long_documents_keep_their_head_and_the_record_says_how_many(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    whole = make(tmp_path, data_dir=str(folder), max_length=1000)
    cut = make(tmp_path, data_dir=str(folder), max_length=20)
    for (short, _), (long, _) in zip(documents(cut, "test"), documents(whole, "test"), strict=True):
        assert short == long[:20]
    share = np.mean([len(text) > 20 for text, _ in documents(whole, "test")])
    assert cut.description()["splits"]["test"]["truncated_share"] == pytest.approx(share, abs=1e-4)
    assert (cut.lengths("test") == [len(text) for text, _ in documents(cut, "test")]).all()
    assert cut.fingerprint != whole.fingerprint


def test_validation_is_held_out_stratified_and_follows_data_seed_alone(tmp_path: Path) -> None:
    folder = str(write_folder(tmp_path / "data", train=100))
    first = make(tmp_path, data_dir=folder, validation_share=0.2, order_seed=1)
    again = make(tmp_path / "other", data_dir=folder, validation_share=0.2, order_seed=2)
    moved = make(tmp_path, data_dir=folder, validation_share=0.2, data_seed=1)
    assert documents(first, "val") == documents(again, "val")
    assert first.fingerprint == again.fingerprint
    assert set(documents(first, "val")) != set(documents(moved, "val"))
    assert not set(documents(first, "val")) & set(documents(first, "train"))
    assert np.bincount(first.data["val"].labels).tolist() == [10, 10]


def test_a_published_validation_split_is_used(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    pd.DataFrame({"text": ["a", "b"], "label": [0, 1]}).to_parquet(folder / "validation.parquet")
    task = make(tmp_path, data_dir=str(folder))
    assert set(documents(task, "val")) == {(b"a", 0), (b"b", 1)}
    assert len(task.data["train"]) == 40


def test_a_smaller_split_keeps_the_proportions_of_the_classes() -> None:
    labels = np.repeat([0, 1, 2], [600, 300, 100])
    order = proportional_order(labels, seed=0)
    assert sorted(order) == list(range(1000))
    for size in (10, 50, 200):
        shares = np.bincount(labels[order[:size]], minlength=3) / size
        assert np.abs(shares - [0.6, 0.3, 0.1]).max() <= 1.5 / size + 1e-9


def test_hub_layout_with_a_folder_for_the_configuration(tmp_path: Path) -> None:
    write_folder(tmp_path / "data" / "plain_text")
    assert len(make(tmp_path, data_dir=str(tmp_path / "data")).data["test"]) == 12


def test_changed_files_are_read_again(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    before = make(tmp_path, data_dir=str(folder))
    write_folder(folder, train=60)
    after = make(tmp_path, data_dir=str(folder))
    assert len(after.data["train"]) == 54
    assert after.fingerprint != before.fingerprint


@pytest.mark.parametrize("damage", ["flip", "cut", "header"])
def test_a_damaged_cache_is_named_and_built_again(tmp_path: Path, damage: str) -> None:
    folder = str(write_folder(tmp_path / "data"))
    sound = make(tmp_path, data_dir=folder)
    victim = next((tmp_path / "cache" / "text").glob("*/train_text.bin"))
    if damage == "flip":
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
    elif damage == "cut":
        victim.write_bytes(victim.read_bytes()[:-5])
    else:
        (victim.parent / "header.json").write_text('{"arrays": {')
    with pytest.warns(UserWarning, match="damaged"):
        again = make(tmp_path, data_dir=folder)
    assert documents(again, "train") == documents(sound, "train")
    assert again.fingerprint == sound.fingerprint


def test_a_copied_cache_is_still_sound(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    folder = str(write_folder(tmp_path / "data"))
    sound = make(tmp_path, data_dir=folder)
    shutil.copytree(tmp_path / "cache" / "text", tmp_path / "moved" / "text")  # other times
    task = Text(cache_dir=tmp_path / "moved", data_dir=folder)
    task.setup()
    assert task.fingerprint == sound.fingerprint
    assert not [w for w in recwarn if "damaged" in str(w.message)]


def faulty(
    folder: Path, texts: list[Any], labels: list[Any], kind: pa.DataType | None = None
) -> str:
    write_folder(folder)
    column = pa.array(texts, kind)
    if pa.types.is_binary(column.type):
        column = column.view(pa.string())  # a text column, unchecked
    table = pa.table({"text": column, "label": pa.array(labels)})
    pq.write_table(table, folder / "train-00000-of-00001.parquet")
    return str(folder)


@pytest.mark.parametrize(
    ("texts", "labels", "says"),
    [
        (["a", "b", " \n"], [0, 1, 0], "row 2: the text is empty"),
        (["a", None, "c"], [0, 1, 0], "row 1: no text"),
        ([b"a", b"b", b"c\xff"], [0, 1, 0], "row 2: text is not UTF-8"),
        (["a", "b"], [1, 1], "every row has the label 1"),
        (["a", "b"], [0, -1], "row 1: label -1"),
        (["a", "b"], [0, None], "row 1: label None"),
        (["a", "b"], ["0", "1"], "row 0: label '0'"),
        ([1, 2], [0, 1], "column 'text' is not text"),
        ([], [], "has no rows"),
    ],
)  # fmt: skip
def test_faulty_rows_are_named(
    tmp_path: Path, texts: list[Any], labels: list[Any], says: str
) -> None:
    kind = None if texts else pa.string()
    folder = faulty(tmp_path / "data", texts, labels or pa.array([], pa.int64()), kind)
    with pytest.raises(UserError, match="train") as error:
        make(tmp_path, data_dir=folder)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_a_test_label_that_train_does_not_have(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data")
    pd.DataFrame({"text": ["a", "b"], "label": [0, 7]}).to_parquet(
        folder / "test-00000-of-00001.parquet"
    )
    with pytest.raises(UserError, match="test, row 1: train has no label 7"):
        make(tmp_path, data_dir=str(folder))


def test_missing_folder_split_column_and_broken_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is not a folder"):
        make(tmp_path, data_dir=str(tmp_path / "nowhere"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"holds no train-\*\.parquet"):
        make(tmp_path, data_dir=str(tmp_path / "empty"))
    folder = write_folder(tmp_path / "data")
    pd.DataFrame({"review": ["a"], "label": [0]}).to_parquet(
        folder / "train-00000-of-00001.parquet"
    )
    with pytest.raises(UserError, match="no column 'text'; it has review, label"):
        make(tmp_path, data_dir=str(folder))
    (folder / "train-00000-of-00001.parquet").write_bytes(b"PAR1 nonsense PAR1")
    with pytest.raises(UserError, match="cannot be read as parquet"):
        make(tmp_path, data_dir=str(folder))
    (write_folder(tmp_path / "half") / "test-00000-of-00001.parquet").unlink()
    with pytest.raises(UserError, match="no test split; it has train"):
        make(tmp_path, data_dir=str(tmp_path / "half"))


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        ({"source": "web"}, "task.source"),
        ({"source": "local"}, "task.data_dir"),
        ({"source": "hub", "data_dir": "x"}, "task.data_dir"),
        ({"max_length": 0}, "task.max_length"),
        ({"num_train": 0}, "task.num_train"),
        ({"validation_share": 1.0}, "task.validation_share"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], setting: str) -> None:
    with pytest.raises(SettingError) as error:
        Text(**settings)
    assert error.value.setting == setting


def test_the_folder_decides_the_source_whatever_the_scale_says() -> None:
    assert Text(data_dir="x", default_source="hub").source == "local"
    assert Text(default_source="hub").source == "hub"


def test_without_network_the_hub_says_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import datasets

    def unreachable(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("Couldn't reach 'stanfordnlp/imdb' on the Hub\nmore")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    with pytest.raises(UserError) as error:
        hub_source("stanfordnlp/imdb", "plain_text", "main", tmp_path).open()
    message = str(error.value)
    assert "task.source=embedded" in message
    assert "task.source=local task.data_dir=" in message
    assert "\n" not in message


def test_accuracy_does_not_depend_on_batches(tmp_path: Path) -> None:
    task = make(tmp_path, data_dir=str(write_folder(tmp_path / "data")))
    right = torch.tensor([1, 0, 1, 1, 0, 1, 1])
    logits = torch.nn.functional.one_hot(right, 2).float()
    target = torch.tensor([1, 0, 0, 1, 1, 1, 0])
    for size in (1, 3, 7):
        metrics = task.new_metrics("test")
        for part in torch.arange(7).split(size):
            task.update(metrics, logits[part], {"target": target[part]})
        assert task.compute(metrics) == {"accuracy": pytest.approx(4 / 7)}


def test_shared_reviews_are_read_whole(shared_data: Path, tmp_path: Path) -> None:
    folder = shared_data / "imdb"
    task = make(tmp_path, data_dir=str(folder), max_length=4096)
    rows = {
        split: len(pd.read_parquet(next(folder.glob(f"{split}-*.parquet"))))
        for split in ("train", "test")
    }
    assert len(task.data["train"]) + len(task.data["val"]) == rows["train"]
    assert len(task.data["test"]) == rows["test"]
    described = task.description()["splits"]
    assert set(described) == set(SPLITS)
    assert described["val"]["class_shares"]["1"] == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize(("resolves", "proxy"), [(False, False), (True, False), (False, True)])
def test_the_hub_s_client_goes_offline_only_where_no_name_resolves(
    monkeypatch: pytest.MonkeyPatch, resolves: bool, proxy: bool
) -> None:
    import datasets
    from huggingface_hub import constants

    def look_up(*args: Any) -> list[Any]:
        if not resolves:
            raise OSError("Name or service not known")
        return []

    monkeypatch.setattr(sources.socket, "getaddrinfo", look_up)
    monkeypatch.setattr(sources, "getproxies", lambda: {"https": "http://proxy"} if proxy else {})
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    sources.stay_offline_without_network()
    offline = not resolves and not proxy
    assert constants.HF_HUB_OFFLINE is offline
    assert datasets.config.HF_HUB_OFFLINE is offline


def test_splits_reach_loader_processes_as_paths(tmp_path: Path) -> None:
    task = make(tmp_path, data_dir=str(write_folder(tmp_path / "data")))
    assert task.data["train"][3]  # mapped here
    sent = pickle.dumps(task.data["train"].text)
    assert len(sent) < 1000
    assert (pickle.loads(sent)[:] == task.data["train"].text[:]).all()
