"""One cell whose parameters are sharded over its devices: PyTorch's FSDP2 as a Lightning strategy.

Lightning's own ``FSDPStrategy`` wraps the older FSDP and refuses any accelerator but CUDA; FSDP2
(``fully_shard``) works over gloo as well, so that what runs on a cluster is tested on a laptop.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    set_model_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor

from gma_bench.errors import SettingError
from gma_bench.mixer.model import SequenceModel
from gma_bench.train.checkpoints import load_checkpoint


class ShardedStrategy(ModelParallelStrategy):
    """``trainer.strategy=fsdp``: each device holds a part of every parameter, gradient and moment.

    Checkpoints are whole: rank 0 assembles and seals one file, which reads like one of a single
    device. Gradients are averaged over devices, as DDP does.
    """

    def __init__(self) -> None:
        super().__init__(tensor_parallel_size=1, save_distributed_checkpoint=False)

    def setup_environment(self) -> None:
        self._data_parallel_size = self.num_nodes * self.num_processes
        super().setup_environment()

    def load_checkpoint(
        self, checkpoint_path: Any, weights_only: bool | None = None
    ) -> dict[str, Any]:
        load_checkpoint(checkpoint_path)  # the seal; Lightning's reader below does not know it
        return super().load_checkpoint(checkpoint_path, weights_only=True)


def shard(model: SequenceModel, mesh: DeviceMesh) -> None:
    """Shard a model over a mesh, in place: a block is gathered when it runs, and let go after it.

    Blocks that share parameters (a mixer tied across layers) are gathered as one, with the rest.
    Calling it again changes nothing.

    Raises:
        SettingError: a module has one parameter under two names; FSDP2 would shard the first and leave
            the other as it was, never trained.
    """
    if isinstance(model, FSDPModule):
        return
    for module in model.modules():
        named = list(module.named_parameters(recurse=False, remove_duplicate=False))
        if len({id(parameter) for _, parameter in named}) < len(named):
            raise SettingError(
                "trainer.strategy", "fsdp",
                f"cannot shard {type(module).__name__}, which has one parameter under two names",
                "trainer=ddp",
            )  # fmt: skip
    shared = Counter(id(p) for block in model.blocks for p in block.parameters())
    if all(count == 1 for count in shared.values()):
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def is_sharded(module: nn.Module) -> bool:
    """Whether any parameter lies in parts on several devices."""
    return any(isinstance(p, DTensor) for p in module.parameters())


def load_whole(module: nn.Module, state: dict[str, Any]) -> None:
    """``module.load_state_dict(state)`` for a whole state, whether the module is sharded or not."""
    if is_sharded(module):
        for part in _parts(module):  # a model's root stays gathered after a forward pass
            part.reshard()
        set_model_state_dict(module, state, options=StateDictOptions(full_state_dict=True))
    else:
        module.load_state_dict(state)


@contextmanager
def gathered(module: nn.Module) -> Iterator[None]:
    """Hold whole parameters while the body runs. All ranks must enter."""
    parts = _parts(module)
    for part in parts:
        part.unshard()
    try:
        yield
    finally:
        for part in parts:
            part.reshard()


def _parts(module: nn.Module) -> list[FSDPModule]:
    return [part for part in module.modules() if isinstance(part, FSDPModule)]
