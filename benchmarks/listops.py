"""How fast ListOps is generated: the size of the Long-Range Arena, against its law node by node."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

from tasks.listops import generate
from tasks.listops_generator import OPERATOR_PROBABILITY, OPERATORS

NUM_EXAMPLES = 100_000
BUDGET_S = 120.0
BASELINE_S = 3.0


def rows(num_examples: int = NUM_EXAMPLES) -> Iterator[dict[str, object]]:
    """Measure; a row a way of generating: examples, seconds, examples per second, and the ratio."""
    start = time.perf_counter()
    data = generate(num_examples, min_length=500, max_length=2000, seed=0)
    seconds = time.perf_counter() - start
    baseline = node_by_node_per_s(BASELINE_S)
    yield {
        "benchmark": "listops_generate",
        "examples": num_examples,
        "tokens": len(data.tokens),
        "seconds": round(seconds, 2),
        "examples_per_s": round(num_examples / seconds),
        "node_by_node_examples_per_s": round(baseline),
        "ratio": round(num_examples / seconds / baseline, 1),
        "budget_s": BUDGET_S,
        "within_budget": seconds <= BUDGET_S,
    }


def node_by_node_per_s(budget_s: float) -> float:
    """Accepted trees a second when every tree is drawn node after node in Python, on one core."""
    rng = random.Random(0)
    accepted, start = 0, time.perf_counter()
    while (elapsed := time.perf_counter() - start) < budget_s:
        accepted += 500 < len(_tree(rng, 1)) < 2000
    return accepted / elapsed


def _tree(rng: random.Random, depth: int) -> list[str]:
    if depth >= 10 or rng.random() > OPERATOR_PROBABILITY:
        return [str(rng.randrange(10))]
    tokens = [rng.choice(OPERATORS)]
    for _ in range(rng.randint(2, 10)):
        tokens += _tree(rng, depth + 1)
    return [*tokens, "]"]
