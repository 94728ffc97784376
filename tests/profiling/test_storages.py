"""The tracker counts each storage once, from its first operator to its last reference."""

import torch

from gma_bench.profiling.storages import StorageTracker, saved_for_backward

KIB = 1024


def test_a_result_counts_until_its_last_reference_is_gone() -> None:
    x = torch.ones(256)
    with StorageTracker() as tracker:
        y = x + 1
        assert tracker.live_bytes == KIB
        view = y[10:20]
        del y
        assert tracker.live_bytes == KIB, "a view keeps the storage alive"
        del view
        assert tracker.live_bytes == 0
        x + 1
        assert tracker.peak_bytes == KIB


def test_what_was_there_before_is_not_counted() -> None:
    x = torch.ones(256)
    with StorageTracker() as tracker:
        view = x.view(16, 16)
        view.add_(1)
        assert tracker.peak_bytes == 0


def test_views_and_in_place_results_are_not_counted_twice() -> None:
    x = torch.ones(256)
    with StorageTracker() as tracker:
        y = x * 2
        z = y.view(2, 128).transpose(0, 1)
        z.mul_(3)
        assert tracker.live_bytes == tracker.peak_bytes == KIB


def test_a_storage_that_grows_in_place_counts_with_its_new_size() -> None:
    with StorageTracker() as tracker:
        x = torch.empty(256)
        x.resize_(1024)
        assert tracker.live_bytes == 4 * KIB
        del x
        assert tracker.live_bytes == 0


def test_autograd_keeps_storages_alive_and_lets_them_go() -> None:
    x = torch.ones(256, requires_grad=True)
    with StorageTracker() as tracker:
        y = (x * 2).exp()  # exp keeps its result, which is y; the product is freed
        assert tracker.live_bytes == KIB
        y.backward(torch.ones(256))
        del y
        assert tracker.live_bytes == KIB, "the gradient of x"
        x.grad = None
        assert tracker.live_bytes == 0


def test_saved_bytes_count_a_storage_once_and_leave_parameters_and_inputs_out() -> None:
    weight = torch.ones(256, requires_grad=True)
    x = torch.ones(256)
    with StorageTracker() as tracker, saved_for_backward(tracker) as saved:
        y = weight * x  # saves x and weight: neither is counted
        assert saved.num_bytes() == 0
        z = y * y  # saves y twice
        assert saved.num_bytes() == KIB
        del y, z
        assert saved.num_bytes() == 0, "what is no longer kept is no longer counted"


def test_saving_hooks_do_not_change_the_peak() -> None:
    layer = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
    x = torch.randn(16, 32)
    peaks = []
    for hooked in (False, True):
        with StorageTracker() as tracker:
            if hooked:
                with saved_for_backward(tracker):
                    out = layer(x).sum()
            else:
                out = layer(x).sum()
            out.backward()
        layer.zero_grad()
        peaks.append(tracker.peak_bytes)
    assert peaks[0] == peaks[1] > 0
