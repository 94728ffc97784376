"""Work spread over processes, in order, with a bounded number of results in flight."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def available_cores() -> int:
    """Cores that this process may use (its affinity, which batch systems set)."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # no affinity outside Linux
        return os.cpu_count() or 1


def ordered_map(
    function: Callable[[Item], Result],
    items: Iterable[Item],
    workers: int,
    *,
    shared: bool = False,
) -> Iterator[Result]:
    """``map(function, items)`` over ``workers`` processes.

    Unlike ``Pool.imap`` it pulls items only as results leave (three a worker are in flight), so
    that a corpus larger than the memory streams through. With one worker nothing is started and the
    work is done here.

    Args:
        function: what is done; importable, or bound to an object that pickles.
        items: what it is done to.
        workers: processes.
        shared: send ``function`` to each worker once and not with each item; for large objects.
    """
    if workers <= 1:
        yield from map(function, items)
        return
    call = _call_kept if shared else function
    kept = function if shared else None
    with ProcessPoolExecutor(workers, initializer=_keep, initargs=(kept,)) as pool:
        pending: deque[Future[Result]] = deque()
        for item in items:
            pending.append(pool.submit(call, item))
            if len(pending) >= 3 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


_kept: list[Any] = []


def _keep(function: Any) -> None:
    _kept[:] = [function]


def _call_kept(item: Any) -> Any:
    return _kept[0](item)
