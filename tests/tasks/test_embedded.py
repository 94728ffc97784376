"""The docstring corpora: real, the same each time, no near-copy in two splits, no name given away."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gma_bench.errors import UserError
from tasks import embedded
from tasks.arrays import entry
from tasks.embedded import (
    PACKAGES,
    SHINGLE_WORDS,
    Corpus,
    classification_examples,
    load_corpus,
    mask_names,
    normalized_words,
    split_documents,
)

SOURCE = '''"""Module docstring with more than eight words in it, that is kept."""
import sys
class Thing:
    """A thing with a docstring of 12 words, kept as well."""
    if sys:
        def method(self):
            r"""A raw docstring with \\d in it and enough words to stay."""
    async def short(self):
        """Too short to stay."""
def copy():
    """A  thing with a docstring of 10 words,
    kept as well."""
'''


@pytest.fixture(scope="session")
def corpus(cache_dir: Path) -> Corpus:
    return load_corpus(cache_dir, workers=1)


def runs(text: str) -> set[tuple[str, ...]]:
    """Eight-word runs, counted without the hashing that the split uses."""
    words = normalized_words(text)
    return {
        tuple(words[i : i + SHINGLE_WORDS]) for i in range(max(1, len(words) - SHINGLE_WORDS + 1))
    }


def fake_packages(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight small packages and what their installer noted, in place of the real ones."""
    names = {f"fake_{package}": f"fake-{package}" for package in PACKAGES}
    for package, distribution in names.items():
        folder = root / package
        (folder / "tests").mkdir(parents=True)
        own = SOURCE.replace("words", f"words of {package}").replace(
            "and enough", f"{package} and enough"
        )
        (folder / "__init__.py").write_text(own)
        (folder / "tests" / "test_it.py").write_text(
            '"""A docstring of a test module that is not wanted here."""'
        )
        (folder / "broken.py").write_text("def (:")
        (folder / "boom.py").write_text(
            f'"""This module of {package} must not be imported by anybody."""\nraise SystemExit'
        )
        info = root / f"{package}-1.0.dist-info"
        info.mkdir()
        about = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\n"
        (info / "METADATA").write_text(about)
        (info / "RECORD").write_text(f"{package}/__init__.py,sha256=abc,1\n")
    monkeypatch.syspath_prepend(root)
    monkeypatch.setattr(embedded, "PACKAGES", names)


def test_docstrings_are_read_from_sources_without_importing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_packages(tmp_path / "site", monkeypatch)
    found = embedded.extract()
    assert {document.package for document in found} == set(embedded.PACKAGES)
    torch = [d for d in found if d.package == "fake_torch"]
    own_names = ["", ".Thing", ".Thing.method", ".boom"]
    assert [d.name for d in torch] == [f"fake_torch{name}" for name in own_names]
    assert torch[2].text.startswith("A raw docstring with \\d in it")
    assert not any("test module" in d.text for d in found)
    assert embedded.extract(workers=2) == found


def test_a_changed_package_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_packages(tmp_path / "site", monkeypatch)
    before = load_corpus(tmp_path / "cache", workers=1)
    init = tmp_path / "site" / "fake_scipy" / "__init__.py"
    init.write_text(init.read_text().replace("Module", "Another module"))
    assert load_corpus(tmp_path / "cache", workers=1).fingerprint == before.fingerprint  # cached
    record = tmp_path / "site" / "fake_scipy-1.0.dist-info" / "RECORD"
    record.write_text("fake_scipy/__init__.py,sha256=xyz,1\n")
    after = load_corpus(tmp_path / "cache", workers=1)
    assert after.fingerprint != before.fingerprint
    assert any("Another module" in text for text in after.texts)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(PACKAGES, "not_there", "not-there-at-all")
    with pytest.raises(UserError, match="pip install not-there-at-all"):
        load_corpus(tmp_path)


def test_the_corpus_is_real_and_large(corpus: Corpus) -> None:
    texts = corpus.texts
    assert sum(len(text.encode()) for text in texts) > 20_000_000
    assert sum(len(text.split()) for text in texts) > 3_000_000
    assert set(corpus.labels.tolist()) == set(range(len(PACKAGES)))
    assert len({tuple(normalized_words(text)) for text in texts}) == len(texts)
    assert len(corpus.names) == len(texts)
    assert set(corpus.versions) == set(PACKAGES)


def test_reading_imports_none_of_the_packages_and_agrees(corpus: Corpus, cache_dir: Path) -> None:
    script = (
        "import sys; from tasks.embedded import load_corpus, PACKAGES\n"
        f"print(load_corpus({str(cache_dir)!r}).fingerprint)\n"
        "print([p for p in PACKAGES if p in sys.modules and p != 'numpy'])"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.split("\n")[:2] == [corpus.fingerprint, "[]"]


def assert_no_leak(texts: list[str], parts: dict[str, np.ndarray]) -> None:
    """No index in two splits, and no held-out text half of whose runs occur in an earlier split."""
    everyone = np.concatenate(list(parts.values()))
    assert len(np.unique(everyone)) == len(everyone)
    known: set[tuple[str, ...]] = set()
    for split in ("train", "val", "test"):
        mine = [runs(texts[i]) for i in parts[split]]
        if split != "train":
            assert max(len(one & known) / len(one) for one in mine) < 0.5
        known.update(*mine)


def test_no_docstring_or_near_copy_stands_in_two_splits(corpus: Corpus) -> None:
    texts = corpus.texts[::3]
    parts = split_documents(texts, seed=0)
    assert min(len(part) for part in parts.values()) > 300
    assert_no_leak(texts, parts)


def test_near_copies_are_found_in_both_directions() -> None:
    random = np.random.default_rng(0)
    letters = "abcdefghijklmnopqrstuvwxyz"
    vocabulary = ["".join(random.choice(list(letters), 5)) for _ in range(500)]
    originals = [" ".join(random.choice(vocabulary, 60)) for _ in range(300)]
    versions = [
        text.replace(text.split()[30], "other", 1) + f" 1.{i}" for i, text in enumerate(originals)
    ]
    texts = originals + versions
    parts = split_documents(texts, seed=0, share=0.2)
    assert_no_leak(texts, parts)
    owner = {int(i) % 300: split for split, part in parts.items() for i in part}
    for split, part in parts.items():
        assert all(owner[int(i) % 300] == split for i in part if split != "train")
    assert len(parts["val"]) > 10


def test_splits_follow_the_seed_and_the_groups_share_alike() -> None:
    texts = [
        f"{i} " + " ".join(f"{chr(97 + (i * j) % 26)}{i}w{j}x" for j in range(20))
        for i in range(400)
    ]
    texts = [re.sub(r"\d", lambda d: "zyxwvutsrq"[int(d[0])], text) for text in texts]
    groups = np.repeat([0, 1], [300, 100])
    first = split_documents(texts, 0, groups, share=0.1)
    again = split_documents(texts, 0, groups, share=0.1)
    other = split_documents(texts, 1, groups, share=0.1)
    assert all((first[split] == again[split]).all() for split in first)
    assert set(first["test"]) != set(other["test"])
    for split in ("val", "test"):
        assert np.bincount(groups[first[split]]).tolist() == [30, 10]


def test_classes_are_balanced_long_enough_and_do_not_leak(corpus: Corpus) -> None:
    examples = classification_examples(corpus, seed=0, workers=1)
    texts: list[str] = []
    parts = {}
    for split, (documents, labels) in examples.items():
        counts = np.bincount(labels, minlength=len(PACKAGES))
        assert (counts == counts[0]).all(), split
        assert counts[0] >= (40 if split != "train" else 300), split
        assert min(map(len, documents)) >= 500
        parts[split] = np.arange(len(texts), len(texts) + len(documents))
        texts += [document.decode() for document in documents]
    assert_no_leak(texts, parts)
    given_away = re.compile(
        r"torch|numpy|scipy|pandas|sklearn|scikit|sympy|networkx|matplotlib|pyplot"
        r"|\b(?:np|pd|plt|nx|mpl)\.|https?://|(?-i:^\s*(?:>>>\s*)?(?:import\s|from\s+\S+\s+import))",
        re.I | re.M,
    )
    found = [(match[0], text[:200]) for text in texts if (match := given_away.search(text))]
    assert not found


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        (">>> import numpy as np\n>>> np.sum(x)", ">>> @\n>>> @(x)"),
        ("from sklearn.svm import SVC\nSVC()", "@\nSVC()"),
        ("see :class:`~matplotlib.axes.Axes` and PyTorch's NumPy", "see :class:`~@` and @'s @"),
        (">>> import my.special as sps\n>>> sps.gamma(0.5)\n>>> f(sps)", ">>> @\n>>> @(0.5)\n>>> f(sps)"),
        ("scikit-learn, SciPy. pd.DataFrame plt.plot(x)", "@, @. @ @(x)"),
        ("https://docs.scipy.org/doc/x.html end", "@ end"),
        ("nn.Linear(3) F.relu(x) f(x)", "@(3) @(x) f(x)"),
        ("a __torch_function__ override", "a @ override"),
        ("a tensor, a DataFrame and the Axes stay", "a tensor, a DataFrame and the Axes stay"),
        ("important, from here: imports", "important, from here: imports"),
    ],
)  # fmt: skip
def test_names_and_import_paths_are_masked(text: str, masked: str) -> None:
    assert mask_names(text) == masked


def test_two_builders_at_once_leave_one_sound_entry(tmp_path: Path) -> None:
    script = (
        "import sys, time, numpy as np; from pathlib import Path; from tasks.arrays import entry\n"
        "def build(w):\n"
        "    print('built'); time.sleep(0.5); w.append('a', np.arange(1000))\n"
        f"print(entry(Path({str(tmp_path / 'e')!r}), build).digest)"
    )
    jobs = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    lines = sorted(line for job in jobs for line in job.communicate()[0].split())
    assert lines.count("built") == 1
    stored = entry(tmp_path / "e", lambda writer: pytest.fail("built again"))
    assert set(lines) == {"built", stored.digest}
    assert (stored.array("a")[:] == np.arange(1000)).all()


def test_a_cache_that_other_code_built_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []

    def extract_few(workers: int) -> list[embedded.Docstring]:
        built.append(embedded.code_digest())
        return [embedded.Docstring("numpy", "numpy.f", "text")]

    monkeypatch.setattr(embedded, "extract", extract_few)
    embedded.load_corpus(tmp_path)
    embedded.load_corpus(tmp_path)
    assert len(built) == 1
    monkeypatch.setattr(embedded, "code_digest", lambda: "changed")
    embedded.load_corpus(tmp_path)
    assert built[1:] == ["changed"]
