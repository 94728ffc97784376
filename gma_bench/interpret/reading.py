"""The validation text as ``analyze`` wants it: tokens, documents, spelling, from any task."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gma_bench.task import Task


@dataclass
class Reading:
    """Sequences of a split.

    Attributes:
        tokens: ``(B, N)`` int64.
        mask: ``(B, N)`` bool, True = a real token.
        documents: ``(B, N)`` document numbers.
        texts: ``(B, N)`` tokens as the tokenizer spells them.
        kind: which rules sort the tokens by form.
    """

    tokens: Tensor
    mask: Tensor
    documents: np.ndarray
    texts: list[list[str]]
    kind: str


def read(task: Task, num_tokens: int, split: str = "val") -> Reading:
    """The first examples of a split, until they hold ``num_tokens`` real tokens (at least one example)."""
    examples, documents, total = task.splits[split], [], 0
    taken: list[Any] = []
    for index in range(len(examples)):  # type: ignore[arg-type]
        example = examples[index]
        length = int(task.collate([example])["mask"].sum())
        if taken and total + length > num_tokens:
            break
        taken.append(example)
        documents.append(task.documents(split, index, length))
        total += length
    batch = task.collate(taken)
    tokens, mask = batch["tokens"], batch["mask"]
    numbers = np.zeros(tokens.shape, dtype=np.int64)
    for row, own in enumerate(documents):
        numbers[row, : len(own)] = own
    known = {int(i): word for i, word in _vocabulary(task, tokens).items()}
    texts = [[known[i] for i in row] for row in tokens.tolist()]
    return Reading(tokens, mask, numbers, texts, task.token_kind)


def _vocabulary(task: Task, tokens: Tensor) -> dict[int, str]:
    ids = torch.unique(tokens).numpy()
    return dict(zip(ids.tolist(), task.spell(ids), strict=True))
