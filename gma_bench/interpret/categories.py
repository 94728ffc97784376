"""Surface-form categories of tokens, by rule: each token is in exactly one.

The paper compares components with "surface-form token categories (punctuation, function words, …)"
and does not list them; the sets and the order of the rules here are this project's assumption.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from gma_bench.errors import SettingError
from gma_bench.interpret.function_words import FUNCTION_WORDS

WORD_CATEGORIES = (
    "punctuation",
    "digit",
    "function word",
    "capitalised",
    "upper case",
    "subword continuation",
    "special",
    "other",
)
"""Categories of word and BPE tokens. *special*: control tokens (``<eos>``, ``<unk>``, padding) and
tokens of nothing but white space; *other*: lower-case content words and what no rule names."""

BYTE_CATEGORIES = (
    "lower-case letter",
    "upper-case letter",
    "digit",
    "punctuation",
    "white space",
    "non-ASCII byte",
    "special",
)

LISTOPS_CATEGORIES = ("operator", "digit", "bracket", "special")

CATEGORIES = {
    "word": WORD_CATEGORIES,
    "bpe": WORD_CATEGORIES,
    "byte": BYTE_CATEGORIES,
    "listops": LISTOPS_CATEGORIES,
}
"""The category names of each kind of token; codes count through them from zero."""

SPECIAL = re.compile(r"<[A-Za-z|/_]{1,24}>|<\|[^|]*\|>|\[(PAD|CLS|SEP|UNK|MASK|EOS|BOS)\]")
OPERATOR = re.compile(r"\[?(MIN|MAX|MED|SM)")


def _byte_alphabet() -> dict[str, int]:
    """Character → byte of byte-level BPE (Radford et al. 2019): printable bytes stand for themselves."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    moved = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(moved)}


BYTE_ALPHABET = _byte_alphabet()


def decode_bpe(token: str) -> str:
    """The text of one byte-level BPE token (``Ġthe`` → `` the``); half a character shows as ``�``.

    A token with a character outside the alphabet is a special one and is returned as it is.
    """
    if any(c not in BYTE_ALPHABET for c in token):
        return token
    return bytes(BYTE_ALPHABET[c] for c in token).decode("utf-8", errors="replace")


def display(token: str, kind: str) -> str:
    """A token as it stands in running text: its own characters, with the space that goes before it."""
    if kind == "bpe" and not SPECIAL.fullmatch(token):
        return decode_bpe(token)
    return token if kind in ("bpe", "byte") else f" {token}"


def categorise(tokens: Sequence[str], kind: str) -> np.ndarray:
    """The category of every token of one document.

    Rules for ``word`` and ``bpe``, the first that holds: *special*; *punctuation* (no letter and no
    digit); *digit* (digits and no letter: ``1914``, ``3.5``); *subword continuation* (BPE only: all
    letters, no space before it, and the token before it ends in a letter, so it goes on with a
    word; a word that opens the text or follows a bracket is none); *function word*
    (:mod:`gma_bench.interpret.function_words`, whatever its case); *upper case* (two letters or
    more, all upper); *capitalised*; *other*.

    Args:
        tokens: the N tokens of one document in order, as the tokenizer spells them; for ``bpe`` in
            the byte-level alphabet (``Ġ`` is a leading space), for ``byte`` one character a byte
            (``chr(byte)``) or a special token.
        kind: ``word``, ``bpe``, ``byte`` or ``listops``.

    Returns:
        ``(N,)`` int64: indices into ``CATEGORIES[kind]``.

    Raises:
        SettingError: an unknown kind.
    """
    if kind not in CATEGORIES:
        raise SettingError(
            "task.categories", kind, f"one of {', '.join(CATEGORIES)}", "task.categories=bpe"
        )
    codes = {name: code for code, name in enumerate(CATEGORIES[kind])}
    if kind == "bpe":
        names = _bpe(tokens)
    else:
        rule: Callable[[str], str] = {"word": _word, "byte": _byte, "listops": _listops}[kind]
        known: dict[str, str] = {}
        names = [known.get(t) or known.setdefault(t, rule(t)) for t in tokens]
    return np.fromiter((codes[n] for n in names), dtype=np.int64, count=len(tokens))


def _bpe(tokens: Sequence[str]) -> list[str]:
    names: list[str] = []
    before = ""
    for token in tokens:
        special = bool(SPECIAL.fullmatch(token))
        text = token if special else decode_bpe(token)
        if text.isalpha() and before[-1:].isalpha():
            names.append("subword continuation")
        else:
            names.append(_word(text))
        before = "" if special else text
    return names


def _word(token: str) -> str:
    text = token.strip()
    if not text or SPECIAL.fullmatch(text):
        return "special"
    letters = [c for c in text if c.isalpha()]
    if not letters:
        return "digit" if any(c.isdigit() for c in text) else "punctuation"
    if text.lower().replace("’", "'") in FUNCTION_WORDS:
        return "function word"
    if len(letters) > 1 and all(c.isupper() for c in letters):
        return "upper case"
    return "capitalised" if letters[0].isupper() else "other"


def _byte(token: str) -> str:
    if len(token) != 1:
        return "special"
    if ord(token) > 127:
        return "non-ASCII byte"
    if token.isalpha():
        return "lower-case letter" if token.islower() else "upper-case letter"
    if token.isdigit():
        return "digit"
    if token.isspace():
        return "white space"
    return "punctuation" if token.isprintable() else "special"


def _listops(token: str) -> str:
    if OPERATOR.fullmatch(token):
        return "operator"
    if len(token) == 1 and token.isdigit():
        return "digit"
    return "bracket" if token and not token.strip("[]()") else "special"
