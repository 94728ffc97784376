"""The throughput cell: what its rows say, against figures worked out by hand."""

import json
import subprocess
import sys
from typing import Any

import pytest
import torch

from gma_bench.profiling import throughput
from gma_bench.profiling.flops import count_flops, peak_flops_per_s
from gma_bench.profiling.subject import build_subject
from gma_bench.run.compose import compose

SMALL = ["task=throughput", "scale=smoke", "task.device=cpu", "task.lengths=[32,64]", "task.contexts=[16]",
         "task.cap_seconds=0", "task.block_ms=0.1", "task.components=[]"]  # fmt: skip


def rows_of(tmp_path: Any, *overrides: str) -> list[dict[str, Any]]:
    return throughput.profile(compose([*SMALL, f"cache_dir={tmp_path}", *overrides])).rows


def test_rows_of_gma_beside_sdpa(tmp_path: Any) -> None:
    rows = rows_of(tmp_path, "mixer=gma", "task.components=[4,8]", "task.components_length=32")
    assert {r["status"] for r in rows} == {"ok"}
    assert {r["pass"] for r in rows} == {"forward", "forward_backward", "decode"}
    assert [r["num_components"] for r in rows if r["sweep"] == "components"] == [4, 8] * 2
    assert {r["backend"] for r in rows if r["sweep"] == "length"} == {
        "auto",
        "chunked",
        "reference",
    }
    for row in rows:
        assert row["reference"] == "sdpa"
        assert row["median_ms"] > 0
        assert row["ratio"] == pytest.approx(row["median_ms"] / row["reference_median_ms"], rel=0.9)
        tokens = 1 if row["pass"] == "decode" else row["seq_len"]
        assert row["tokens_per_s"] == pytest.approx(tokens / row["median_ms"] * 1e3)
        assert row["num_threads"] == 1
        assert row["timer"].startswith("torch.utils.benchmark")
    decoded = [r for r in rows if r["pass"] == "decode"]
    # A head's slots: K vectors of head_dim and K masses in float32 (K = 16, 2 heads of 16).
    assert [r["state_bytes"] for r in decoded] == [2 * 16 * (16 + 1) * 4]


def test_the_reference_is_its_own_unit(tmp_path: Any) -> None:
    outcome = throughput.profile(compose([*SMALL, f"cache_dir={tmp_path}", "mixer=sdpa"]))
    assert {r["ratio"] for r in outcome.rows} == {1.0}
    cache = [r["state_bytes"] for r in outcome.rows if r["pass"] == "decode"]
    assert cache == [2 * 16 * 32 * 4], "keys and values of 16 tokens, 32 wide"
    assert outcome.value == 1.0
    assert outcome.parameters == 4 * 32 * 32


def test_another_reference_can_be_chosen(tmp_path: Any) -> None:
    rows = rows_of(tmp_path, "mixer=sdpa", "mixer@task.reference=mha", "task.passes=[forward]")
    assert {r["reference"] for r in rows} == {"mha"}


def test_a_mixer_without_causal_form_is_timed_but_not_decoded(tmp_path: Any) -> None:
    rows = rows_of(tmp_path, "mixer=linformer", "task.passes=[forward]")
    assert [r["status"] for r in rows] == ["ok", "ok", "unavailable"]
    assert "causal" in rows[-1]["reason"]


def test_a_mixer_with_backends_of_its_own_is_timed_with_its_choice_alone(tmp_path: Any) -> None:
    rows = rows_of(tmp_path, "mixer=mamba", "task.passes=[forward]")
    assert {r["status"] for r in rows} == {"ok"}
    assert len({r["backend"] for r in rows}) == 1


def test_calls_that_would_take_too_long_are_marked(tmp_path: Any) -> None:
    rows = rows_of(tmp_path, "mixer=sdpa", "task.lengths=[32,64,128]", "task.call_seconds=0",
                   "task.passes=[forward]", "task.contexts=[]")  # fmt: skip
    assert [r["status"] for r in rows] == ["ok", "ok", "time"]
    assert rows[-1]["reached"] == 64


@pytest.mark.parametrize("mixer", ["sdpa", "mha"])
def test_flops_of_attention_are_those_of_its_products(mixer: str) -> None:
    config = compose([*SMALL, f"mixer={mixer}"])
    n, d = 64, config.model.d_model

    def build(backward: bool) -> Any:
        return build_subject(config, config.mixer, scope="layer", seq_len=n, backward=backward,
                             device=torch.device("cpu"), causal=False)  # fmt: skip

    projections, attention = 4 * 2 * n * d * d, 2 * 2 * n * n * d
    assert count_flops(lambda: build(False)) == projections + attention
    # Backward: two products for each of the forward's; fused kernels compute the scores once more.
    again = attention // 2 if mixer == "sdpa" else 0
    assert count_flops(lambda: build(True)) == 3 * (projections + attention) + again


def test_flops_of_gma_are_counted_and_linear_in_length() -> None:
    config = compose([*SMALL, "mixer=gma"])
    counts = [
        count_flops(lambda n=n: build_subject(  # type: ignore[misc]
            config, config.mixer, scope="layer", seq_len=n, backward=True,
            device=torch.device("cpu"), causal=False))
        for n in (1024, 2048)
    ]  # fmt: skip
    d, k = config.model.d_model, config.mixer.num_components
    least = 3 * 1024 * (4 * 2 * d * d + 2 * 2 * d * k)  # projections, write and read, thrice
    assert counts[0] > least
    assert counts[1] == pytest.approx(2 * counts[0], rel=0.01)


def test_peaks_are_found_by_the_device_name() -> None:
    assert peak_flops_per_s("NVIDIA H100 80GB HBM3", "bfloat16") == 989.4e12
    assert peak_flops_per_s("NVIDIA H100 PCIe", "bfloat16") == 756e12
    assert peak_flops_per_s("NVIDIA A100-SXM4-80GB", "float32") == 19.5e12
    assert peak_flops_per_s("NVIDIA A10", "float32") == 31.2e12
    assert peak_flops_per_s("AMD EPYC", "float32") is None
    assert peak_flops_per_s("Tesla T4", "bfloat16") is None


ONE_CELL = """
import json, sys, torch
from gma_bench.run.compose import compose
from gma_bench.profiling import throughput
config = compose(["task=throughput", "scale=mini", "task.device=cpu", "mixer=" + sys.argv[1],
                  "task.lengths=[1024]", "task.contexts=[16384]", "task.components=[]", "task.backends.gma=[]",
                  "task.cap_seconds=10", "task.block_ms=50", "cache_dir=" + sys.argv[2]])
print(json.dumps(throughput.profile(config).rows))
"""


@pytest.mark.timing
@pytest.mark.parametrize("mixer", ["gma", "linear_transformer"])
def test_ratios_agree_in_a_second_process(mixer: str, tmp_path: Any) -> None:
    def ratios() -> dict[str, float]:
        done = subprocess.run([sys.executable, "-c", ONE_CELL, mixer, str(tmp_path)],
                              capture_output=True, text=True, check=True)  # fmt: skip
        return {r["pass"]: r["ratio"] for r in json.loads(done.stdout.splitlines()[-1])}

    first, second = ratios(), ratios()
    assert first.keys() == second.keys() == {"forward", "forward_backward", "decode"}
    for step, ratio in first.items():
        assert second[step] == pytest.approx(ratio, rel=0.1), step
