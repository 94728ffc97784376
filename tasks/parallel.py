"""Work spread over processes, in order, with a bounded number of results in flight."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """Cores that this process may use (its affinity, which batch systems set)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # no affinity outside Linux
        return os.cpu_count() or 1


def ordered_map(
    function: Callable[[Item], Result], items: Iterable[Item], workers: int
) -> Iterator[Result]:
    """``map(function, items)`` over ``workers`` processes.

    Unlike ``Pool.imap`` it pulls items only as results leave (three a worker are in flight), so
    that a corpus larger than the memory streams through. With one worker nothing is started and the
    work is done here.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    with ProcessPoolExecutor(workers) as pool:
        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
