"""Sources are a part of a run's identity: an edited mixer never reuses an old figure."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gma_bench.results import read_all
from gma_bench.run import sources
from gma_bench.run.execute import run_cell

MIXER = """
from torch import Tensor
from gma_bench.mixer import Mixer
from mine.scale import SCALE

class Scaled(Mixer):
    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        return SCALE * x
"""


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "code" / "mine"
    folder.mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "mixer.py").write_text(MIXER)
    (folder / "scale.py").write_text("SCALE = 1.0\n")
    (folder / "unused.py").write_text("")
    monkeypatch.syspath_prepend(str(folder.parent))
    sources.sources_digest.cache_clear()
    yield folder
    for name in [m for m in sys.modules if m.partition(".")[0] == "mine"]:
        del sys.modules[name]
    sources.sources_digest.cache_clear()


def test_a_module_is_known_by_what_it_imports_of_its_own_package(package: Path) -> None:
    files = sources.module_files("mine.mixer")
    assert {"mine.mixer", "mine.scale", "gma_bench.mixer"} <= files.keys()
    assert "mine.unused" not in files
    assert not any(name.startswith("torch") for name in files)


def test_compiled_sources_and_operators_belong_to_gma() -> None:
    files = sources.module_files("gma_bench.mixer.gma")
    assert {"gma_bench.ops.native", "gma_bench.ops.native.cpp", "gma_bench.ops.chunked"} <= set(
        files
    )
    assert not any(n.startswith(("gma_bench.report", "gma_bench.run")) for n in files)


@pytest.mark.parametrize("edited", ["mixer.py", "scale.py"])
def test_an_edited_mixer_runs_again_and_shares_no_mean(
    tiny: list[str], package: Path, edited: str
) -> None:
    kept = [o for o in tiny if not o.startswith("mixer=")]
    overrides = [*kept, "training.steps=2", "mixer._target_=mine.mixer.Scaled"]
    first = run_cell(overrides)
    assert first["status"] == "finished", first["error"]
    assert run_cell(overrides)["skipped"]
    with open(package / edited, "a") as file:
        file.write("\n# another version\n")
    sources.sources_digest.cache_clear()  # another process would not have it
    second = run_cell(overrides)
    assert "skipped" not in second
    assert second["run_id"] != first["run_id"]
    assert second["group_hash"] != first["group_hash"]
    folder = next(o for o in tiny if o.startswith("results_dir=")).partition("=")[2]
    assert len(read_all(folder)[0]) == 2


def test_what_cannot_be_imported_has_no_sources() -> None:
    assert sources.sources_digest("no.such.module.Mixer") is None
