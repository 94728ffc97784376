"""English text that every installation already has: the docstrings of the scientific packages.

Docstrings are read with ``ast``; no package is imported. Left out: test and vendored folders (their
docstrings belong to another project), and docstrings of fewer than eight words. Of docstrings that
have the same words, one is kept.

The corpus stands in for IMDb and WikiText-103 where there is no network. It is technical prose with
markup and code examples, not film reviews and not encyclopedia articles.
"""

from __future__ import annotations

import ast
import gc
import hashlib
import importlib.metadata
import importlib.util
import re
import warnings
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from gma_bench.errors import UserError
from tasks.arrays import Entry, Writer, code_digest, entry
from tasks.parallel import available_cores, ordered_map

PACKAGES = {
    "torch": "torch",
    "numpy": "numpy",
    "scipy": "scipy",
    "pandas": "pandas",
    "sklearn": "scikit-learn",
    "sympy": "sympy",
    "networkx": "networkx",
    "matplotlib": "matplotlib",
}
"""Import name to distribution, in the order of the class labels."""

SHINGLE_WORDS = 8
CLASSIFIED_HELD_OUT = 0.15
"""Share of the classified docstrings for validation, and for test: they are few."""
MASK = "@"
MIN_CLASSIFIED_BYTES = 500

_SKIPPED_FOLDERS = re.compile(
    r"^(tests?|testing|externals?|extern|_vendor|_vendored|vendored|third_party|_external|libs"
    r"|array_api_compat|array_api_extra|_array_api_override|conftest|parsetab)$"
)


class Docstring(NamedTuple):
    """One documented object."""

    package: str
    name: str
    """Dotted module and qualified name of the object."""
    text: str


class Corpus:
    """The docstrings, in memory: parallel lists, ordered by package and name."""

    def __init__(self, stored: Entry) -> None:
        text = stored.array("text").values.tobytes()
        ends = stored.array("ends").values.tolist()
        starts = [0, *ends[:-1]]
        self.texts = [text[a:b].decode() for a, b in zip(starts, ends, strict=True)]
        self.labels = stored.array("labels").values.astype(np.int64)
        self.names = stored.array("names").values.tobytes().decode().split("\n")
        self.versions: dict[str, str] = stored.meta["versions"]
        self.fingerprint = stored.digest

    def __len__(self) -> int:
        return len(self.texts)


def load_corpus(cache_dir: Path | str, workers: int | None = None) -> Corpus:
    """The docstrings of :data:`PACKAGES`, extracted once for the installed versions and cached.

    Args:
        cache_dir: the cache's root.
        workers: processes for the extraction; all cores by default.

    Raises:
        UserError: one of the packages is not installed.
    """
    versions, digest = _installed()
    folder = Path(cache_dir) / "embedded" / f"docstrings-{digest[:16]}"

    def build(writer: Writer) -> None:
        documents = extract(workers or available_cores())
        encoded = [document.text.encode() for document in documents]
        labels = [list(PACKAGES).index(document.package) for document in documents]
        writer.append("text", np.frombuffer(b"".join(encoded), dtype=np.uint8))
        writer.append("ends", np.cumsum([len(text) for text in encoded], dtype=np.int64))
        writer.append("labels", np.asarray(labels, dtype=np.uint8))
        names = "\n".join(document.name for document in documents).encode()
        writer.append("names", np.frombuffer(names, dtype=np.uint8))
        writer.meta["versions"] = versions

    return Corpus(entry(folder, build))


def _installed() -> tuple[dict[str, str], str]:
    """Versions of the packages; a digest of their sources, as installers recorded them, and of our code."""
    versions: dict[str, str] = {}
    digest = hashlib.sha256(f"code {code_digest()}\n".encode())
    for package, distribution in PACKAGES.items():
        try:
            installed = importlib.metadata.distribution(distribution)
        except importlib.metadata.PackageNotFoundError as error:
            raise UserError(
                f"task.source=embedded reads the docstrings of {distribution}, which is not "
                f"installed. Try: pip install {distribution}, or task.source=local task.data_dir=…"
            ) from error
        versions[package] = installed.version
        digest.update(f"{package} {installed.version}\n".encode())
        record = installed.read_text("RECORD") or ""
        digest.update("\n".join(sorted(re.findall(r"^.*\.py,sha256=.*$", record, re.M))).encode())
    return versions, digest.hexdigest()


def extract(workers: int = 1) -> list[Docstring]:
    """Every docstring of at least eight words, no two with the same words, by package and name."""
    batches = [batch for package in PACKAGES for batch in _source_batches(package)]
    found = [doc for batch in ordered_map(_read_batch, batches, workers) for doc in batch]
    found.sort()
    seen: set[tuple[str, ...]] = set()
    kept = []
    for document in found:
        words = tuple(normalized_words(document.text))
        if len(words) >= SHINGLE_WORDS and words not in seen:
            seen.add(words)
            kept.append(document)
    return kept


def _source_batches(package: str) -> Iterator[tuple[str, Path, list[Path]]]:
    spec = importlib.util.find_spec(package)  # a top-level name is located, not imported
    if spec is None or not spec.submodule_search_locations:
        raise UserError(f"task.source=embedded cannot locate {package}. Try: pip install {package}")
    root = Path(spec.submodule_search_locations[0])
    files = [
        path
        for path in sorted(root.rglob("*.py"))
        if not any(map(_SKIPPED_FOLDERS.match, path.relative_to(root).with_suffix("").parts))
    ]
    for start in range(0, len(files), 32):
        yield package, root, files[start : start + 32]


def _read_batch(batch: tuple[str, Path, list[Path]]) -> list[Docstring]:
    package, root, files = batch
    collecting = gc.isenabled()
    gc.disable()  # syntax trees hold no cycles; looking for them takes a quarter of the time
    try:
        return [
            Docstring(package, name, text)
            for path in files
            for name, text in _docstrings_of(path, _module_name(package, root, path))
        ]
    finally:
        if collecting:
            gc.enable()


def _module_name(package: str, root: Path, path: Path) -> str:
    parts = path.relative_to(root).with_suffix("").parts
    return ".".join((package, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def _docstrings_of(path: Path, module: str) -> Iterator[tuple[str, str]]:
    try:
        source = path.read_bytes()
        if b'"""' not in source and b"'''" not in source:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's sources
            tree = ast.parse(source)
    except (SyntaxError, ValueError, OSError):
        return  # templates and files for another Python; the same on every machine
    stack: list[tuple[str, ast.AST]] = [(module, tree)]
    while stack:
        name, node = stack.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text:  # lone surrogates from escapes have no UTF-8 form
                yield name, text.encode("utf-8", "replace").decode()
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                stack.append((f"{name}.{child.name}", child))
            elif isinstance(child, ast.stmt | ast.ExceptHandler):
                stack.append((name, child))


def normalized_words(text: str) -> list[str]:
    """Lower-case words, with every number the same: what near-copies have in common."""
    return re.sub(r"\d+", "0", text.lower()).replace("_", " ").split()


def shingles(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Hashes of every run of eight consecutive words, and the text each comes from.

    Returns:
        hashes ``(S,)`` uint64 and owners ``(S,)`` int64. A text of fewer words has one shingle, of
        all its words.
    """
    numbers: dict[str, int] = {}
    ids, ends = [], []
    for text in texts:
        words = normalized_words(text)
        words += [""] * (SHINGLE_WORDS - len(words))
        ids += [numbers.setdefault(word, len(numbers) + 1) for word in words]
        ends.append(len(ids))
    flat = np.asarray(ids, dtype=np.uint64)
    owners = np.repeat(np.arange(len(texts)), [b - a for a, b in pairwise([0, *ends])])
    count = max(0, len(flat) - SHINGLE_WORDS + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for offset in range(SHINGLE_WORDS):  # a polynomial in an odd base, modulo 2**64
        hashes = hashes * np.uint64(0x9E3779B97F4A7C15) + flat[offset : offset + count]
    inside = owners[:count] == owners[SHINGLE_WORDS - 1 :]
    return hashes[inside], owners[:count][inside]


def split_documents(
    texts: list[str], seed: int, groups: np.ndarray | None = None, share: float = 0.05
) -> dict[str, np.ndarray]:
    """Split texts into train, val and test, with no text or near-copy of it in two of them.

    The order is that of a hash of ``seed`` and the text's words. A held-out text of which half or
    more of the eight-word runs occur in an earlier split (train, then val) is left out.

    Args:
        texts: what is split.
        seed: fixes the split.
        groups: ``(n,)`` labels; every group is split in the same proportions.
        share: of the texts (of each group), for val and for test each.

    Returns:
        indices into ``texts`` by split, in the order of the hash.
    """
    order = draw_order(texts, seed)
    place = np.empty(len(texts))  # in [0, 1), within the text's group
    for group in np.unique(groups) if groups is not None else [0]:
        members = order if groups is None else order[groups[order] == group]
        place[members] = np.arange(len(members)) / len(members)
    place = place[order]
    test, val, train = (
        order[place < share],
        order[(place >= share) & (place < 2 * share)],
        order[place >= 2 * share],
    )
    hashes, owners = shingles(texts)

    def fresh(candidates: np.ndarray, earlier: np.ndarray) -> np.ndarray:
        known, mine = (
            np.isin(np.arange(len(texts)), earlier)[owners],
            np.isin(np.arange(len(texts)), candidates)[owners],
        )
        repeated = np.bincount(
            owners[mine], _contained(hashes[mine], hashes[known]), minlength=len(texts)
        )
        total = np.bincount(owners[mine], minlength=len(texts))
        return candidates[2 * repeated[candidates] < total[candidates]]

    val = fresh(val, train)
    return {"train": train, "val": val, "test": fresh(test, np.concatenate([train, val]))}


def _contained(few: np.ndarray, many: np.ndarray) -> np.ndarray:
    """``np.isin(few, many)``, sorting only the few."""
    unique, inverse = np.unique(few, return_inverse=True)
    places = np.minimum(np.searchsorted(unique, many), max(0, len(unique) - 1))
    found = np.zeros(len(unique), dtype=bool)
    found[places[unique[places] == many]] = True
    return found[inverse]


def draw_order(texts: list[str], seed: int) -> np.ndarray:
    """Indices of ``texts`` in a random order that follows from ``seed`` and each text's words."""
    draws = [
        hashlib.sha256(f"{seed}\0{' '.join(normalized_words(text))}".encode()).digest()
        for text in texts
    ]
    return np.asarray(sorted(range(len(texts)), key=draws.__getitem__), dtype=np.int64)


_NAME = r"torch|numpy|scipy|pandas|sklearn|scikit|sympy|networkx|matplotlib|pyplot|pylab"
_PATH = r"(?:\.\w+)*"
_URL = re.compile(r"\b(?:https?|ftp)://\S+|\bwww\.\S+")
_IMPORT = re.compile(
    r"^(\s*(?:>>>|\.\.\.|In \[\d+\]:)?\s*)(?:from\s+\S+\s+import\b|import\s).*$", re.M
)
_ALIAS = re.compile(r"\bimport\s+[\w.]+\s+as\s+(\w+)|\bfrom\s+\S+\s+import\s+(\w+)\s+as\s+(\w+)")
_NAMED = re.compile(rf"(?:{_NAME})\w*{_PATH}(?:-(?:learn|image)\b)?", re.I)
_SHORT = re.compile(rf"\b(?:np|sp|pd|plt|mpl|nx|sns|sym|tf|mlab|cbook){_PATH}(?!\w)", re.I)
_CASED = re.compile(r"(?<![\w.])(?:F|nn)\.\w+(?:\.\w+)*")


def mask_names(text: str) -> str:
    """Replace package names, their usual aliases, import lines, dotted paths and URLs by ``@``.

    Masked in every class alike, whichever package is named, without regard to case: each word
    that contains the name of one of the eight packages, with the dotted path around it; the aliases
    np, sp, pd, plt, mpl, nx, sym (and tf, sns, mlab, cbook) and ``F.…``, ``nn.…``; the aliases that
    the docstring's own imports give; import statements to the end of the line; URLs.

    Not masked: the vocabulary of each package (tensor, DataFrame, Axes, estimator) and its habits
    of markup, which are what a classifier is to find.
    """
    own = {name for match in _ALIAS.finditer(text) for name in match.groups() if name}
    text = _URL.sub(MASK, text)
    text = _IMPORT.sub(rf"\1{MASK}", text)
    text = _mask_named(text)
    text = _SHORT.sub(MASK, text)
    text = _CASED.sub(MASK, text)
    if own:
        names = "|".join(sorted(map(re.escape, own)))
        text = re.sub(rf"(?<![\w.])(?:{names})(?:\.\w+)+", MASK, text)
    return text


def _mask_named(text: str) -> str:
    """Replace each word with a package's name in it, and the dotted path that it is part of."""
    kept, done = [], 0
    for match in _NAMED.finditer(text):
        start = match.start()
        while start > done and (text[start - 1].isalnum() or text[start - 1] in "_."):
            start -= 1
        kept.append(text[done:start])
        done = match.end()
    return MASK.join([*kept, text[done:]])


def classification_examples(
    corpus: Corpus, seed: int, workers: int | None = None
) -> dict[str, tuple[list[bytes], np.ndarray]]:
    """Which package a docstring comes from: masked texts of at least 500 bytes, classes balanced.

    Every class is cut to the size of the smallest, over all and in each split.

    Returns:
        split to texts (UTF-8) and labels ``(n,)`` int64, the places in :data:`PACKAGES`.
    """
    large = np.asarray(
        [i for i, text in enumerate(corpus.texts) if len(text.encode()) >= MIN_CLASSIFIED_BYTES]
    )  # masking lengthens nothing
    pieces = [[corpus.texts[i] for i in large[start::16]] for start in range(16)]
    results = ordered_map(_mask_all, pieces, workers or available_cores())
    masked = {
        int(i): t
        for k, piece in enumerate(results)
        for i, t in zip(large[k::16], piece, strict=True)
    }
    large = np.asarray([i for i in large if len(masked[i].encode()) >= MIN_CLASSIFIED_BYTES])
    order = large[draw_order([masked[i] for i in large], seed)]
    chosen = _balanced(order, corpus.labels)
    texts, labels = [masked[i] for i in chosen], corpus.labels[chosen]
    parts = split_documents(texts, seed, labels, CLASSIFIED_HELD_OUT)
    parts = {split: _balanced(members, labels) for split, members in parts.items()}
    return {
        split: ([texts[i].encode() for i in members], labels[members])
        for split, members in parts.items()
    }


def _mask_all(texts: list[str]) -> list[str]:
    return [mask_names(text) for text in texts]


def _balanced(members: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """The first members of each class, as many as the smallest class has; their order is kept."""
    mine = labels[members]
    rank = np.empty(len(members), dtype=np.int64)
    for label in range(len(PACKAGES)):
        rank[mine == label] = np.arange((mine == label).sum())
    return members[rank < min((mine == label).sum() for label in range(len(PACKAGES)))]
