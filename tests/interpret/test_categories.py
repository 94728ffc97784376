"""Every token is in one category, and the rules put it where a reader would."""

from __future__ import annotations

import pytest

from gma_bench.errors import SettingError
from gma_bench.interpret.categories import (
    BYTE_CATEGORIES,
    CATEGORIES,
    LISTOPS_CATEGORIES,
    WORD_CATEGORIES,
    categorise,
    decode_bpe,
    display,
)
from gma_bench.interpret.function_words import FUNCTION_WORDS


def named(tokens: list[str], kind: str) -> list[str]:
    return [CATEGORIES[kind][code] for code in categorise(tokens, kind)]


@pytest.mark.parametrize(
    ("token", "category"),
    [
        (",", "punctuation"), ("@-@", "punctuation"), ("=", "punctuation"), ("…", "punctuation"),
        ("1914", "digit"), ("3.5", "digit"), ("@1", "digit"), ("½x", "other"),
        ("the", "function word"), ("The", "function word"), ("NOT", "function word"), ("'s", "function word"),
        ("NASA", "upper case"), ("U.S.", "upper case"), ("A1", "capitalised"), ("Paris", "capitalised"),
        ("McDonald", "capitalised"), ("Élan", "capitalised"), ("house", "other"), ("naïve", "other"),
        ("日本", "other"), ("iPhone", "other"), ("<eos>", "special"), ("<unk>", "special"),
        ("<|endoftext|>", "special"), ("", "special"), ("\n", "special"), ("<", "punctuation"),
    ],
)  # fmt: skip
def test_words(token: str, category: str) -> None:
    assert named([token], "word") == [category]


def test_a_subword_goes_on_only_after_a_letter() -> None:
    tokens = [
        "sy",
        "ll",
        "ables",
        "Ġ(",
        "naÃ¯ve",
        "Ġthe",
        "3",
        "d",
        "Ċ",
        "a",
        "Ġx",
        "1",
        "<pad>",
        "b",
    ]
    assert named(tokens, "bpe") == [
        "other", "subword continuation", "subword continuation", "punctuation", "other",
        "function word", "digit", "other", "special", "function word", "other", "digit", "special", "other",
    ]  # fmt: skip


def test_bytes_and_listops() -> None:
    tokens = ["a", "Z", "7", "(", " ", "\n", "Ã", "<pad>", "\x00"]
    assert named(tokens, "byte") == [
        "lower-case letter", "upper-case letter", "digit", "punctuation", "white space", "white space",
        "non-ASCII byte", "special", "special",
    ]  # fmt: skip
    assert named(["[MAX", "3", "]", "(", "[SM", "<pad>"], "listops") == [
        "operator", "digit", "bracket", "bracket", "operator", "special",
    ]  # fmt: skip


def test_codes_index_the_names() -> None:
    assert set(WORD_CATEGORIES) == {
        "punctuation", "digit", "function word", "capitalised", "upper case",
        "subword continuation", "special", "other",
    }  # fmt: skip
    assert len(set(BYTE_CATEGORIES)) == 7
    assert len(set(LISTOPS_CATEGORIES)) == 4
    with pytest.raises(SettingError, match="one of word, bpe, byte, listops"):
        categorise(["a"], "morpheme")


def test_function_words_are_lower_case_and_closed() -> None:
    assert all(word == word.lower() and " " not in word for word in FUNCTION_WORDS)
    assert {"the", "of", "and", "is", "she", "because", "n't"} <= FUNCTION_WORDS
    assert not {"house", "run", "new", "time", "said", ""} & FUNCTION_WORDS


def test_tokens_are_shown_as_they_stand_in_text() -> None:
    assert decode_bpe("Ġthe") == " the"
    assert decode_bpe("Ã¯") == "ï"
    assert decode_bpe("Ã") == "�"
    assert decode_bpe("<eos>") == "<eos>"
    assert display("the", "word") == " the"
    assert display("<pad>", "bpe") == "<pad>"
    assert display("a", "byte") == "a"
