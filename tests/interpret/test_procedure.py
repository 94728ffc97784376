"""The cell: trains or takes a GMA, reads the validation text, writes figures, pictures and the page."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn

from gma_bench import GaussianMixtureAttention
from gma_bench.errors import UserError
from gma_bench.interpret.attention import softmax_attention
from gma_bench.interpret.gradients import RoutingGradients, gradient_norms
from gma_bench.run.execute import run_cell

CLAIMED = [
    "components_in_use", "components_in_use_fraction", "num_components", "usage_entropy",
    "usage_entropy_low", "usage_entropy_high", "nmi", "nmi_low", "nmi_high", "ami", "ami_low", "ami_high",
    "nmi_permuted", "effective_components", "affinity_rank_max", "affinity_min", "gradient_norm_max",
    "gradient_norm_initial", "lipschitz_empirical", "lipschitz_bound", "posterior_entropy",
    "query_key_overlap", "affinity_same_token", "affinity_neighbours", "affinity_same_category",
]  # fmt: skip
"""What results/paper.yaml and the report read."""


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in the hub's layout: articles of a few lines."""
    folder = tmp_path_factory.mktemp("text")
    rng = np.random.default_rng(0)
    words = [
        "the",
        "cat",
        "sat",
        "on",
        "a",
        "mat",
        ",",
        "12",
        "dogs",
        "in",
        "Rome",
        ".",
        "NASA",
        "and",
        "it",
        "was",
        "not",
        "far",
        "away",
    ]
    for split, articles in (("train", 40), ("validation", 12), ("test", 4)):
        lines = []
        for number in range(articles):
            lines += [f" = Article {number} = "]
            lines += [" " + " ".join(rng.choice(words, 30)) + " " for _ in range(3)]
        pd.DataFrame({"text": lines}).to_parquet(folder / f"{split}-00000-of-00001.parquet")
    return folder


@pytest.fixture
def cell(text: Path, tmp_path: Path, cache_dir: Path) -> list[str]:
    return [
        "task=interpretability", "mixer=gma", "scale=smoke", "seed=0", "trainer=cpu", "logger=none",
        f"results_dir={tmp_path / 'results'}", f"cache_dir={cache_dir}", "task.source=local",
        f"task.data_dir={text}", "task.tokenizer=word", "task.max_length=48", "task.num_tokens=900",
        "task.resamples=50", "training.steps=6", "training.log_every=2", "training.evaluations=2",
        "model.num_layers=1", "mixer.num_components=16",
    ]  # fmt: skip


def test_the_cell_from_training_to_page(cell: list[str], tmp_path: Path) -> None:
    record = run_cell(cell, keep_failure=False)
    metrics = record["metrics"]["val"]
    assert [name for name in CLAIMED if not math.isfinite(metrics[name])] == []
    assert (record["metric"], record["split"]) == ("usage_entropy", "val")
    assert record["value"] == metrics["usage_entropy"]
    assert 0 < record["value"] <= 1
    assert metrics["num_components"] == 16
    assert metrics["affinity_rank_max"] <= 16
    assert metrics["affinity_min"] >= 0
    assert metrics["num_documents"] > 4
    assert metrics["num_tokens"] > 800
    assert metrics["perplexity"] > 1
    assert [(row["layer"], row["head"]) for row in record["rows"]] == [(0, 0), (0, 1)]
    assert set(CLAIMED) - set(record["rows"][0]) == {"gradient_norm_max", "gradient_norm_initial"}
    curves = record["curves"]
    assert curves["step"] == [2, 4, 6]
    assert max(curves["gradient_norm"]) == metrics["gradient_norm_max"]
    folder = tmp_path / "results" / "smoke" / "artifacts" / record["run_id"]
    assert record["extra"]["artifacts"][0] == "interpretability.html"
    assert all((folder / name).is_file() for name in record["extra"]["artifacts"])
    assert "trained on the same text for the same 6 steps" in record["extra"]["companion"]
    json.dumps(record["rows"])
    _its_checkpoint_gives_the_same(cell, record)
    _a_checkpoint_of_another_model_is_refused(cell, record)


def _its_checkpoint_gives_the_same(cell: list[str], record: dict[str, Any]) -> None:
    results = next(o.partition("=")[2] for o in cell if o.startswith("results_dir="))
    checkpoint = Path(results) / "smoke" / record["extra"]["checkpoint"]
    again = run_cell(
        [*cell, f"task.checkpoint={checkpoint}", "task.companion=false"], keep_failure=False
    )
    for name in ("usage_entropy", "nmi_low", "ami", "lipschitz_empirical"):
        assert again["metrics"]["val"][name] == record["metrics"]["val"][name]
    assert "gradient_norm_max" not in again["metrics"]["val"]
    damaged = checkpoint.with_name("damaged.ckpt")
    shutil.copy(checkpoint, damaged)
    damaged.write_bytes(damaged.read_bytes()[:-900])
    with pytest.raises(UserError, match=r"task.checkpoint=.*damaged"):
        run_cell([*cell, f"task.checkpoint={damaged}"], keep_failure=False)


def _a_checkpoint_of_another_model_is_refused(cell: list[str], record: dict[str, Any]) -> None:
    results = next(o.partition("=")[2] for o in cell if o.startswith("results_dir="))
    checkpoint = Path(results) / "smoke" / record["extra"]["checkpoint"]
    with pytest.raises(UserError, match="is of another model"):
        run_cell([*cell, "model.d_model=64", f"task.checkpoint={checkpoint}"], keep_failure=False)


def test_a_finished_record_of_another_task(tiny: list[str]) -> None:
    trained = run_cell([*tiny, "mixer.num_components=8"], keep_failure=False)
    common = [
        o
        for o in tiny
        if o.partition("=")[0]
        in ("mixer", "scale", "trainer", "logger", "results_dir", "cache_dir")
    ]
    read = [
        "task=interpretability",
        *common,
        "task.resamples=20",
        "task.companion=false",
        "task.num_tokens=500",
    ]
    record = run_cell([*read, f"task.record={trained['run_id']}"], keep_failure=False)
    assert record["extra"]["categories"] == ["operator", "digit", "bracket", "special"]
    assert record["metrics"]["val"]["num_components"] == 8
    assert record["data"]["fingerprint"] == trained["data"]["fingerprint"]
    assert len(record["rows"]) == 2
    with pytest.raises(UserError, match="no record that can be read"):
        run_cell([*read, "task.record=listops-gma-s0-000000000000"], keep_failure=False)
    _a_record_never_names_code(read, trained)


def _a_record_never_names_code(read: list[str], trained: dict[str, Any]) -> None:
    results = Path(next(o.partition("=")[2] for o in read if o.startswith("results_dir=")))
    path = results / "smoke" / "runs" / f"{trained['run_id']}.json"
    record = json.loads(path.read_text())
    for node in ("task", "mixer"):
        record["config"][node]["_target_"] = "os.system"
        record["config"][node]["name"] = {"_target_": "os.system"}
    record["config"]["task"]["procedure"] = "os.system"
    path.write_text(json.dumps(record))
    again = run_cell([*read, f"task.record={trained['run_id']}", "rerun=true"], keep_failure=False)
    assert again["metrics"]["val"]["num_components"] == 8


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("task.side=both", "must be key or query"),
        ("task.num_tokens=0", "at least 1"),
        ("task.resamples=none", "at least 1"),
        ("mixer=sdpa", "holds no GaussianMixtureAttention"),
    ],
)
def test_what_cannot_be_read(cell: list[str], override: str, message: str) -> None:
    overrides = [o for o in cell if not (override.startswith("mixer=") and o.startswith("mixer"))]
    with pytest.raises(UserError, match=message):
        run_cell([*overrides, override], keep_failure=False)


# -- gradients ---------------------------------------------------------------------------------


def test_routing_gradients_are_those_of_what_acts_through_the_responsibilities() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(GaussianMixtureAttention(8, 2, num_components=4), nn.Linear(8, 8))
    model(torch.randn(2, 5, 8)).square().mean().backward()
    layer = model[0]
    routing = [
        layer.q_proj.weight,
        layer.k_proj.weight,
        layer.means,
        layer.raw_variance,
        layer.log_priors,
    ]
    others = [layer.v_proj.weight, layer.out_proj.weight, *model[1].parameters()]
    for found, parameters in zip(gradient_norms(model), (routing, others), strict=True):
        joined = torch.cat([p.grad.flatten() for p in parameters])
        assert found == pytest.approx(float(joined.norm()), rel=1e-5)
        assert found > 0
    assert len(routing) + len(others) == len(list(model.parameters()))


def test_no_spike_falls_between_two_logged_steps() -> None:
    gradients = RoutingGradients()
    gradients.load_state_dict(
        {"steps": [1, 2, 3, 4, 5], "norms": [1.0, 9.0, 2.0, 3.0, 8.0], "others": [2.0] * 5}
    )
    assert gradients.at([2, 4]) == [9.0, 3.0]
    figures = gradients.figures()
    assert figures["gradient_norm_initial"] == 1
    assert figures["gradient_norm_max"] == 9
    assert figures["gradient_norm_ratio_max"] == 4.5
    resumed = RoutingGradients()
    resumed.load_state_dict(gradients.state_dict())
    assert resumed.figures() == figures
    assert RoutingGradients().figures() == {}


# -- softmax attention -------------------------------------------------------------------------


@pytest.mark.parametrize("causal", [False, True])
def test_softmax_weights_give_what_the_fused_kernel_gives(causal: bool) -> None:
    from baselines.sdpa import SDPA

    torch.manual_seed(0)
    layer = SDPA(8, 2, causal=causal)
    x = torch.randn(1, 6, 8)
    weights = torch.from_numpy(softmax_attention(layer, x)[0])
    values = layer.split_heads(layer.v_proj(x))[0]
    assert torch.allclose(
        layer.out_proj((weights @ values).transpose(0, 1).flatten(1)), layer(x)[0], atol=1e-6
    )
    assert torch.allclose(weights.sum(-1), torch.ones(2, 6))
    with pytest.raises(UserError, match="no softmax attention"):
        softmax_attention(nn.Linear(2, 2), x)
