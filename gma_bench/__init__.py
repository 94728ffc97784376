"""gma_bench: a benchmark harness for efficient sequence mixers, and Gaussian Mixture Attention."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gma_bench.mixer import Mixer
    from gma_bench.mixer.gma import GaussianMixtureAttention

__version__ = "0.1.0"
__all__ = ["GaussianMixtureAttention", "Mixer"]


def __getattr__(name: str) -> Any:
    # Lazy, so that `gma-bench --help` and a config error do not wait for torch.
    if name == "GaussianMixtureAttention":
        from gma_bench.mixer.gma import GaussianMixtureAttention

        return GaussianMixtureAttention
    if name == "Mixer":
        from gma_bench.mixer import Mixer

        return Mixer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
