"""Tasks say how their tokens are spelled and which document each is of; interpretability relies on it."""

from __future__ import annotations

import numpy as np

from gma_bench.interpret.categories import BYTE_ALPHABET, decode_bpe
from tasks.listops import ListOps
from tasks.text import Text
from tasks.tokenizers import BytePairTokenizer, ByteTokenizer, WordTokenizer
from tasks.wikitext103 import WikiText103, Windows

TEXT = "The cat’s 12 hats (naïve)\n"


def test_bpe_tokens_spell_the_text() -> None:
    tokenizer = BytePairTokenizer.train([TEXT * 3], 300)
    spelled = tokenizer.spell(tokenizer.encode([TEXT])[0])
    encoded = "".join(spelled)
    assert bytes(BYTE_ALPHABET[c] for c in encoded).decode() == TEXT
    assert "".join(map(decode_bpe, spelled)).replace("�", "").startswith("The cat")


def test_other_tokens_spell_themselves() -> None:
    words = WordTokenizer(["the", "cat"])
    assert words.spell([0, 1, 2, 3, 4]) == ["<pad>", "<eos>", "<unk>", "the", "cat"]
    assert "".join(ByteTokenizer().spell(ByteTokenizer().encode(["a é"])[0])) == "a Ã©"
    assert Text.spell(None, np.array([0, 98])) == ["<pad>", "a"]  # type: ignore[arg-type]
    assert ListOps.spell(None, np.array([0, 1, 15]))[:2] == ["<pad>", "0"]  # type: ignore[arg-type]


def test_documents_of_a_window_follow_the_ends() -> None:
    class Stream:
        stream = np.arange(11)
        tokens = 10
        ends = np.array([3, 4, 10])

    task = WikiText103.__new__(WikiText103)
    task.__dict__["data"] = {"val": Stream()}
    task.__dict__["splits"] = {"val": Windows(Stream(), 4, 4)}  # type: ignore[arg-type]
    # Input 0 is the line end before the text; inputs 1–3 are document 0, input 4 is document 1.
    assert task.documents("val", 0, 4).tolist() == [0, 0, 0, 0]
    assert task.documents("val", 1, 4).tolist() == [1, 2, 2, 2]
