"""Layers of any package through ``layer=``: found out, called in their own terms, held to the contract."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gma_bench.cli import main
from gma_bench.errors import SettingError
from gma_bench.mixer import Mixer, contract
from gma_bench.mixer.adapter import LayerMixer
from gma_bench.mixer.model import build_mixer
from gma_bench.profiling import memory, throughput
from gma_bench.run.compose import compose, resolved

ROOT = Path(__file__).resolve().parent.parent
LAYERS = '''
import torch
from torch import nn
import torch.nn.functional as F

class Attention(nn.Module):
    """Softmax attention of one head; a causal switch, a mask whose True is a real token."""

    def __init__(self, dim, causal=False):
        super().__init__()
        self.causal, self.qkv, self.out = causal, nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x, mask=None):
        n = x.shape[1]
        allowed = torch.ones(len(x), n, n, dtype=torch.bool)
        if mask is not None:
            x = torch.where(mask[..., None], x, 0.0)
            allowed = allowed & (mask[:, None] | ~mask[..., None])
        if self.causal:
            allowed = allowed.tril()
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=allowed))

class IgnoresMaskAlone(Attention):
    def forward(self, x, mask=None):
        return super().forward(x, mask if len(x) > 1 else None)

class PaddingInTheState(nn.Module):
    """Two scans; the one from the right starts in the padding."""

    def __init__(self, dim):
        super().__init__()
        self.left, self.right = nn.GRU(dim, dim, batch_first=True), nn.GRU(dim, dim, batch_first=True)

    def forward(self, x):
        return self.left(x)[0] + self.right(x.flip(1))[0].flip(1)

class LooksAhead(nn.Module):
    """A causal layer but for a convolution padded on both sides."""

    def __init__(self, dim):
        super().__init__()
        self.conv, self.gru = nn.Conv1d(dim, dim, 3, padding=1), nn.GRU(dim, dim, batch_first=True)

    def forward(self, x):
        return self.gru(self.conv(x.transpose(1, 2)).transpose(1, 2))[0]

class KeepsItsState(nn.Module):
    """Starts where the call before ended."""

    def __init__(self, dim):
        super().__init__()
        self.gru, self.state = nn.GRU(dim, dim, batch_first=True), None

    def forward(self, x):
        if self.state is not None and self.state.shape[1] != len(x):
            self.state = None
        y, state = self.gru(x, self.state)
        self.state = state.detach()
        return y

class Odd(nn.Module):
    """Nothing that a name tells: length first, True is padding, the second output."""

    def __init__(self, size):
        super().__init__()
        self.inner = Attention(size)

    def forward(self, tokens, ignored=None):
        x = tokens.transpose(0, 1)
        y = self.inner(x, None if ignored is None else ~ignored)
        return {"nothing": None, "wanted": y.transpose(0, 1)}
'''


@pytest.fixture
def my_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "outside"
    folder.mkdir()
    (folder / "my_layers.py").write_text(LAYERS)
    monkeypatch.syspath_prepend(str(folder))
    return folder


def checked(
    *overrides: str, without: str = "works under torch.compile"
) -> dict[tuple[str, str], Any]:
    """Results by line and form, those of torch.compile left out, which take seconds."""
    config = compose(["scale=smoke", *overrides]).mixer
    lines = {line.name for line in contract.LINES} - {without}
    results = contract.check(lambda **s: build_mixer(config, **s), device="cpu", only=lines)
    return {(r.line, r.form): r for r in results}


def failed(results: dict[tuple[str, str], Any]) -> dict[tuple[str, str], str]:
    return {key: r.detail for key, r in results.items() if r.status == "fail"}


def test_a_sound_layer_passes(my_layers: Path) -> None:
    results = checked("layer=my_layers.Attention")
    assert not failed(results)
    for form in contract.FORMS:
        built = results["builds", form].detail
        assert built == f"built with dim=32, causal={form == 'causal'}; called with x, mask=mask"
        assert results["step by step equals all at once", form].status == "not applicable"


FAULTS = [
    ("layer=my_layers.IgnoresMaskAlone", "masked positions influence nothing", "bidirectional",
     "B=1 N=2 masked=tail: what is under the mask changes the output by"),
    ("layer=my_layers.PaddingInTheState", "right padding does not change real positions",
     "bidirectional", "B=1 N=1: 1 positions of padding change the output by"),
    ("layer=my_layers.LooksAhead", "every token reaches every output", "bidirectional",
     "B=2 N=5: output 0 ignores token 4"),
    ("layer=my_layers.LooksAhead +mixer.forms=[causal]", "no later token reaches an earlier output",
     "causal", "B=1 N=2: tokens from 1 on change earlier outputs by"),
    ("layer=my_layers.KeepsItsState", "a call leaves nothing behind", "causal",
     "B=1 N=1: after another call, the same input's output differs by"),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "line", "form", "says"), FAULTS, ids=lambda v: str(v)[:40])
def test_a_planted_fault_is_found_with_the_smallest_input(
    my_layers: Path, overrides: str, line: str, form: str, says: str
) -> None:
    found = failed(checked(*overrides.split()))
    assert found[line, form].startswith(says)


def test_what_names_do_not_tell_is_given_in_a_file(my_layers: Path) -> None:
    file = my_layers / "odd.yaml"
    file.write_text(
        "layer: my_layers.Odd\narguments: {size: d_model}\nmask: ignored\nmask_true: padding\n"
        "batch_first: false\noutput: wanted\n"
    )
    results = checked(f"layer={file}")
    assert not failed(results)
    assert "ignored=~mask" in results["builds", "bidirectional"].detail
    assert results["builds", "causal"].status == "not applicable"
    assert "no causal form" in results["builds", "causal"].detail


PUBLIC = {
    "torch.nn.MultiheadAttention": ("bidirectional", "causal"),
    "torch.nn.TransformerEncoderLayer": ("bidirectional", "causal"),
    "torch.nn.GRU": ("causal",),
    "torch.nn.LSTM": ("causal",),
    "x_transformers.Attention": ("bidirectional", "causal"),
    "linformer.yaml": ("bidirectional",),
    "performer_pytorch.SelfAttention": ("bidirectional", "causal"),
    "nystrom_attention.NystromAttention": ("bidirectional",),
    "transformers_mamba.yaml": ("causal",),
    "transformers_mamba2.yaml": ("causal",),
    "transformers_rwkv.yaml": ("causal",),
    "mambapy.yaml": ("causal",),
}


@pytest.mark.parametrize("layer", PUBLIC)
def test_public_layers_have_the_forms_they_have(layer: str) -> None:
    file = ROOT / "docs/layers" / layer
    if file.suffix == ".yaml":
        assert len(file.read_text().splitlines()) <= 10
        layer = str(file)
    config = compose(["scale=smoke", f"layer={layer}"]).mixer
    pytest.importorskip(config.layer.partition(".")[0])
    names = {"shape and dtype are kept", "outputs at masked positions are zero"}
    results = contract.check(lambda **s: build_mixer(config, **s), device="cpu", only=names)
    assert not [r for r in results if r.status == "fail"]
    passed = {r.form for r in results if r.status == "pass"}
    assert passed == set(PUBLIC[file.name if file.suffix == ".yaml" else layer])


def test_the_audit_is_of_these_layers_under_the_contract_as_it_is() -> None:
    page = (ROOT / "docs/audit.md").read_text()
    audited = re.findall(r"^gma-bench check layer=(\S+)$", page, re.MULTILINE)
    assert [Path(layer).name if "/" in layer else layer for layer in audited] == list(PUBLIC)
    assert f"{len(contract.LINES)} lines in each form" in page, "run docs/update_audit.py"
    for file in filter(lambda name: name.endswith(".yaml"), PUBLIC):
        assert (ROOT / "docs/layers" / file).read_text().strip() in page
    named = {line.name for line in contract.LINES}
    assert set(re.findall(r"^- ([^:]+): `", page, re.MULTILINE)) <= named


def test_it_agrees_with_the_layer_called_by_hand() -> None:
    mixer = LayerMixer(32, 4, causal=True, layer="torch.nn.MultiheadAttention")
    x, real = torch.randn(2, 7, 32), torch.arange(7) < torch.tensor([[7], [4]])
    later = nn.Transformer.generate_square_subsequent_mask(7).isinf()
    want, _ = mixer.layer(x, x, x, key_padding_mask=~real, attn_mask=later, need_weights=False)
    torch.testing.assert_close(mixer(x, real), want * real.unsqueeze(-1))


MISTAKES = [
    ("layer=nope.Nope", "must be an importable class"),
    ("layer=os.path.join", "must be a subclass of torch.nn.Module"),
    ("layer=baselines.sdpa.SDPA", "mixer._target_=baselines.sdpa.SDPA"),
    ("layer=torch.nn.Bilinear", "is also built with in1_features, in2_features, out_features"),
    ("layer=torch.nn.TransformerDecoderLayer", "is also called with memory"),
    ("layer=nowhere.yaml", "must be a YAML file"),
    ("layer=torch.nn.GRU +mixer.maks=x", "LayerMixer takes: layer"),
    ("layer=torch.nn.GRU +mixer.part=nope", "mixer.part=nope: torch.nn.GRU has no parts"),
]


@pytest.mark.parametrize(("overrides", "says"), MISTAKES)
def test_a_mistake_is_one_line(
    overrides: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "scale=smoke", *overrides.split()]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


def test_a_layer_without_the_form_says_so() -> None:
    with pytest.raises(SettingError, match="no bidirectional form, only causal"):
        LayerMixer(32, 4, layer="torch.nn.GRU")
    assert isinstance(LayerMixer(32, 4, causal=True, layer="torch.nn.GRU"), Mixer)


def test_longer_than_it_was_built_for_is_refused() -> None:
    pytest.importorskip("linformer")
    mixer = LayerMixer(32, 4, max_length=8, layer="linformer.LinformerSelfAttention")
    with pytest.raises(SettingError, match=r"task\.max_length=9"):
        mixer(torch.randn(1, 9, 32))


def test_check_from_the_command_line(
    my_layers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["check", "scale=smoke", "layer=my_layers.KeepsItsState", "--json"]) == 1
    rows = json.loads(capsys.readouterr().out)
    assert {r["mixer"] for r in rows} == {"my_layers.KeepsItsState"}
    code = next(
        r["code"] for r in rows if r["line"] == "a call leaves nothing behind" and r["code"]
    )
    (tmp_path / "script.py").write_text(code, encoding="utf-8")
    runpy.run_path(str(tmp_path / "script.py"))
    assert "after another call" in capsys.readouterr().out


def test_a_layer_is_run_and_its_source_is_part_of_the_run(
    my_layers: Path, tiny: list[str], tmp_path: Path
) -> None:
    cell = [*(o for o in tiny if not o.startswith("mixer=")), "layer=my_layers.Attention"]
    assert main(["run", *cell]) == 0
    (record,) = (tmp_path / "results").rglob("runs/*.json")
    assert json.loads(record.read_text())["mixer"] == "my_layers.Attention"
    assert resolved(compose(cell))["mixer"]["layer_sources_sha256"]


def test_a_layer_is_profiled(my_layers: Path, tmp_path: Path) -> None:
    sizes = ["scale=smoke", "task.lengths=[32,64]", "model.d_model=32", "model.num_heads=2"]
    layer = ["layer=my_layers.Attention", f"cache_dir={tmp_path}"]
    config = compose(["task=throughput", *sizes, *layer, "task.contexts=[32]"])
    rows = throughput.profile(config).rows
    assert any(r.get("median_ms") for r in rows)
    assert {r["reason"] for r in rows if r["pass"] == "decode"} == {"LayerMixer does not stream"}
    rows = memory.profile(compose(["task=memory", *sizes, *layer])).rows
    assert all(r["peak_bytes"] > 0 for r in rows if r.get("status") != "unavailable")
