"""GMA on a CPU in float32: compiles ``native.cpp`` once, and registers what it computes as operators.

The system's C++ compiler builds it for the processor at hand at the first call (a few seconds) into
``$XDG_CACHE_HOME/gma_bench``; without a compiler ``backend="auto"`` takes the plain torch form. It runs
on torch's own OpenMP threads: others beside them would wait for cores on which those still spin.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import mmap
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from gma_bench.ops import blocks, chunked

SOURCE = Path(__file__).with_name("native.cpp")
FLAGS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-shared", "-fPIC")
STEPS = (
    "write", "read", "read_backward", "write_backward", "causal", "causal_backward", "finish",
)  # fmt: skip
"""What the library computes; in the order of its own table."""

STATE_TOKENS = 512
"""Tokens between two states that the causal form keeps for backward."""

PART_TOKENS = 1024
"""Fewest tokens of a split, or of a part with sums of its own: what a part costs must not show."""

HUGE_PAGE = 2**21
"""Bytes of a huge page on most machines."""

LARGE = 2**25
"""Bytes from which on glibc's allocator takes new pages from the system every time."""

TASKS = 32
"""How many tasks a call is cut into where it has the tokens. Not the number of threads: results are
the same whatever that is."""


class Unavailable(Exception):
    """The library can't be had here; the message says why."""


# ---------------------------------------------------------------- the library


def compiler() -> tuple[str, ...]:
    """The words of the C++ compiler: ``CXX`` with its arguments, or the system's; empty without one."""
    chosen = os.environ.get("CXX")
    for words in [shlex.split(chosen)] if chosen else [["c++"], ["g++"]]:
        if words and (found := shutil.which(words[0])):
            return found, *words[1:]
    return ()


@functools.cache
def compiler_version() -> str:
    """The first line that the compiler says of itself; empty without one."""
    found = compiler()
    if not found:
        return ""
    said = subprocess.run([*found, "--version"], capture_output=True, text=True).stdout
    return said.partition("\n")[0]


@functools.cache
def library() -> ctypes.CDLL:
    """The compiled library, built where it is not in the cache.

    Raises:
        Unavailable: no compiler, or it refuses.
    """
    found = compiler()
    if not found or os.name != "posix":
        raise Unavailable("no C++ compiler was found (CXX, c++ or g++)")
    parts = SOURCE.read_text(encoding="utf-8"), *FLAGS, *found, compiler_version(), processor()
    name = f"native-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:16]}.so"
    for folder in (cache_folder(), Path(tempfile.gettempdir()) / f"gma_bench-{os.getuid()}"):
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if folder.stat().st_uid != os.getuid():
                raise PermissionError(f"{folder} belongs to somebody else, and what is in it may")
            if not (folder / name).exists():
                build(found, folder / name)
            return load(folder / name)
        except OSError as error:  # cannot be written, or holds what cannot be loaded
            problem = error
    raise Unavailable(f"the compiled kernels cannot be kept or loaded: {problem}")


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gma_bench"


def processor() -> str:
    """What tells processors apart that want code of their own; home directories may be shared."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return " ".join(os.uname())
    return "\n".join(sorted({line for line in lines if line.startswith(("flags", "Features"))}))


def build(command: Sequence[str], target: Path) -> None:
    """Compile to ``target``, which is whole or absent at any moment."""
    handle, name = tempfile.mkstemp(suffix=".so", dir=target.parent)
    os.close(handle)
    try:
        done = subprocess.run(
            [*command, *FLAGS, str(SOURCE), "-o", name], capture_output=True, text=True
        )
        if done.returncode:
            raise Unavailable(
                f"{shlex.join(command)} could not compile {SOURCE.name}: {done.stderr.strip()}"
            )
        os.replace(name, target)
    finally:
        Path(name).unlink(missing_ok=True)


def load(path: Path) -> ctypes.CDLL:
    """The library, its functions with their types."""
    loaded = ctypes.CDLL(str(path))
    loaded.gma_scratch.argtypes = (ctypes.c_void_p,)
    loaded.gma_scratch.restype = ctypes.c_int64
    loaded.gma_work.argtypes = (ctypes.c_void_p,)
    loaded.gma_work.restype = None
    return loaded


@functools.cache
def team() -> Any:
    """``GOMP_parallel`` of the OpenMP runtime that torch has loaded; None where there is no such thing."""
    start = getattr(ctypes.CDLL(None), "GOMP_parallel", None)
    if start is not None:
        start.argtypes = ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
        start.restype = None
    return start


@torch.compiler.assume_constant_result
def problem() -> str | None:
    """Why the library can't be had, or None."""
    return _problem()


@functools.cache
def _problem() -> str | None:
    try:
        library()
    except Unavailable as error:
        return str(error)
    return None


def why_not(*tensors: Tensor) -> str | None:
    """What keeps the compiled form from taking these inputs, or None."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            return f"tensors are on {tensor.device.type}: it runs on cpu"
        if tensor.dtype != torch.float32:
            return f"{tensor.dtype} is not supported: it takes torch.float32"
    return problem()


# ---------------------------------------------------------------- a call of it


class View(ctypes.Structure):
    """A tensor (B, H, N, width): address, and strides in floats."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("batch", "head", "token")),
    )


class Side(ctypes.Structure):
    """The queries or the keys: how many, and into how many splits and parts they are cut.

    A split of a sequence sums for itself what is written and read; a part, of one or more splits,
    what the gradients of the mixture are made of.
    """

    _fields_ = tuple((name, ctypes.c_int64) for name in ("length", "splits", "parts"))


class Call(ctypes.Structure):
    """Arguments of a step, as ``native.cpp`` declares them."""

    _fields_ = (
        *((n, ctypes.c_int64) for n in ("batch", "heads", "components", "width", "value_width")),
        ("queries", Side),
        ("keys", Side),
        ("eps", ctypes.c_float),
        *((n, View) for n in ("q", "k", "v", "out", "grad_out", "grad_q", "grad_k", "grad_v")),
        *(
            (name, ctypes.c_void_p)
            for name in (
                "means", "variances", "log_priors", "key_mask", "centre", "written", "mass",
                "grad_memory", "grad_bias", "sums", "grad_means", "grad_variances",
                "grad_log_priors", "scratch",
            )
        ),
        *(
            (name, ctypes.c_int64)
            for name in ("scratch_size", "step", "workers", "next", "too_large")
        ),
    )  # fmt: skip


def splits(x: Tensor) -> int:
    """Into how many splits each sequence of ``x (B, H, N, ·)`` is cut."""
    sequences = max(1, x.shape[0] * x.shape[1])
    return max(1, min(-(-TASKS // sequences), x.shape[2] // PART_TOKENS))


def side(x: Tensor, count: int) -> Side:
    """How ``x (B, H, N, ·)`` is cut, its sequences into ``count`` splits."""
    batch, heads, length, _ = x.shape
    parts = min(batch * count, -(-TASKS // heads), batch * length // PART_TOKENS)
    return Side(length, count, max(1, parts))


class Run:
    """A call in one direction, step after step."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        means: Tensor,
        variances: Tensor,
        log_priors: Tensor,
        key_mask: Tensor | None,
        causal: bool,
        eps: float,
        **tensors: Tensor,
    ) -> None:
        one = 1 if causal else None  # chunks follow one another
        self.queries, self.keys = side(q, one or splits(q)), side(k, one or splits(k))
        self.heads, self.parts = q.shape[1], max(self.queries.parts, self.keys.parts)
        self.call = Call(
            *q.shape[:2], means.shape[1], q.shape[3], v.shape[3], self.queries, self.keys, eps
        )
        self.held: list[Tensor] = []  # what the call has addresses of
        self.give(q=q, k=k, v=v, means=means, variances=variances, log_priors=log_priors, **tensors)
        if (centre := blocks.lone_values(v, key_mask)) is not None:
            self.give(centre=centre)
        if key_mask is not None:
            self.give(key_mask=key_mask)

    def give(self, **tensors: Tensor) -> None:
        """Name the tensors that steps read and write; a copy of what is read in a layout of its own."""
        for name, tensor in tensors.items():
            if isinstance(getattr(self.call, name), View):
                tensor = blocks.rows_contiguous(tensor)
                setattr(self.call, name, View(tensor.data_ptr(), *tensor.stride()[:3]))
            else:
                tensor = tensor.contiguous()
                setattr(self.call, name, tensor.data_ptr())
            self.held.append(tensor)

    def steps(self, *names: str) -> bool:
        """Run these one after another; whether float32 could bear the numbers that they met."""
        tasks = self.heads * self.parts
        for name in names:
            run(STEPS.index(name), self.call, 1 if name == "finish" else tasks)
            if self.call.too_large:
                return False
        return True


def run(step: int, call: Call, tasks: int) -> None:
    """Run a step on as many threads as torch has, or as there are tasks."""
    code, start = library(), team()
    threads = 1 if start is None else max(1, min(torch.get_num_threads(), tasks))
    call.step, call.workers, call.next = step, 0, 0
    call.scratch_size = code.gma_scratch(ctypes.byref(call))
    size = threads * call.scratch_size
    scratch = torch.empty(size, dtype=torch.float32, device="cpu")  # by torch: profilers see it
    call.scratch = scratch.data_ptr()
    if threads == 1:
        code.gma_work(ctypes.byref(call))
    else:
        start(ctypes.cast(code.gma_work, ctypes.c_void_p), ctypes.byref(call), threads, 0)


# ---------------------------------------------------------------- what the operators do


def in_huge_pages(*tensors: Tensor) -> None:
    """Ask the system for huge pages behind new tensors, before they are written for the first time.

    A long sequence's output spans many thousand ordinary pages, and each costs an interrupt then;
    shorter ones lie in memory that was used before. A hint; nothing changes where it is not heard.
    """
    advise = madvise()
    if advise is None:
        return
    for tensor in tensors:
        start = -(-tensor.data_ptr() // HUGE_PAGE) * HUGE_PAGE
        size = (tensor.data_ptr() + tensor.nbytes - start) // HUGE_PAGE * HUGE_PAGE
        if tensor.nbytes >= LARGE:
            advise(start, size, mmap.MADV_HUGEPAGE)


@functools.cache
def madvise() -> Any:
    """The system's function of that name; None where it has none, or no huge pages."""
    advise = getattr(ctypes.CDLL(None), "madvise", None)
    if advise is None or not hasattr(mmap, "MADV_HUGEPAGE"):
        return None
    advise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return advise


def states_like(
    q: Tensor, k: Tensor, v: Tensor, means: Tensor, causal: bool
) -> tuple[Tensor, Tensor]:
    """Room for what backward needs: ``Ṽ`` and ``Z`` of each split, or the states that causal keeps."""
    count = -(-q.shape[2] // STATE_TOKENS) if causal else splits(k)
    mass = q.new_empty(count, *q.shape[:2], means.shape[1])
    return mass.new_empty(*mass.shape, v.shape[3]), mass


def gma_body(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output, then what backward needs; see :func:`states_like`."""
    out, (written, mass) = blocks.like_layout(q, v), states_like(q, k, v, means, causal)
    inputs = q, k, v, means, variances, log_priors, key_mask, causal, eps
    in_huge_pages(out)
    call = Run(*inputs, out=out, written=written, mass=mass)
    if not call.steps(*(("causal",) if causal else ("write", "read"))):
        out = chunked.gma_body(*inputs)[0]  # it has float64 for such numbers
    return out, written, mass


def gma_backward_body(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    key_mask: Tensor | None,
    written: Tensor,
    mass: Tensor,
    causal: bool,
    eps: float,
) -> chunked.Six:
    """Gradients of q, k, v, means, variances and log priors."""
    inputs = q, k, v, means, variances, log_priors, key_mask, causal, eps
    tokens = [torch.empty_like(t) for t in (q, k, v)]
    filled = [blocks.rows_contiguous(t) for t in tokens]
    in_huge_pages(*filled)
    call = Run(*inputs, written=written, mass=mass, grad_out=grad_out)
    call.give(grad_q=filled[0], grad_k=filled[1], grad_v=filled[2])
    components, width = means.shape[1:]
    call.give(sums=q.new_zeros(call.parts, q.shape[1], components * (2 * width + 1)))
    if not causal:
        grad_bias = mass.new_empty(call.queries.splits, *mass.shape[1:])
        call.give(
            grad_bias=grad_bias, grad_memory=grad_bias.new_empty(*grad_bias.shape, v.shape[3])
        )
    if not call.steps(*(("causal_backward",) if causal else ("read_backward", "write_backward"))):
        kept = chunked.gma_body(*inputs)[1:]
        return chunked.gma_backward_body(grad_out, *inputs[:7], *kept, causal, eps)
    blocks.copy_back(tokens, filled)
    grads = [t.new_empty(t.shape) for t in (means, variances, log_priors)]
    call.give(grad_means=grads[0], grad_variances=grads[1], grad_log_priors=grads[2])
    call.steps("finish")
    return *tokens, *grads  # type: ignore[return-value]


# ---------------------------------------------------------------- registration

_define: Any = torch.library.custom_op
gma_op = _define("gma_bench::gma_native", gma_body, mutates_args=())
gma_backward_op = _define("gma_bench::gma_native_backward", gma_backward_body, mutates_args=())


@gma_op.register_fake
def _(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    means: Tensor,
    variances: Tensor,
    log_priors: Tensor,
    key_mask: Tensor | None,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return blocks.like_layout(q, v), *states_like(q, k, v, means, causal)


gma_backward_op.register_fake(chunked.gradients_like)


def _grad(ctx: Any, grad_out: Tensor | None, *_: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_out is None:
        return (None,) * 9
    grads = torch.ops.gma_bench.gma_native_backward(
        grad_out, *ctx.saved_tensors, ctx.causal, ctx.eps
    )
    return *grads, None, None, None


gma_op.register_autograd(_grad, setup_context=chunked.keep_for_backward)
gma_backward_op.register_autograd(chunked.refuse_double_backward)

_forward_formula: Any = chunked.gma_flops
_backward_formula: Any = chunked.gma_backward_flops


@register_flop_formula(torch.ops.gma_bench.gma_native)
def _flops(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    return int(_forward_formula(*shapes))


@register_flop_formula(torch.ops.gma_bench.gma_native_backward)
def _backward_flops(*shapes: Any, out_shape: Any = None, **_: Any) -> int:
    return int(_backward_formula(*shapes))
