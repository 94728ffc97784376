"""The compiled CPU backend is the reference, on any number of threads, and knows when it can't be had."""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gma_bench.ops import gma, native
from tests.ops.cases import FORMS, KINDS, errors, evaluate, far, make

pytestmark = pytest.mark.skipif(native.problem() is not None, reason=str(native.problem()))


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("form", FORMS)
def test_it_is_within_1e_5(form: str) -> None:
    case = make(**FORMS[form])
    want = evaluate(case, "reference", torch.float64)
    got = evaluate(case, "native", torch.float32)
    assert max(errors(got, want)) < 1e-5
    assert not got[0][want[0] == 0].any()  # where nothing is read, no rounding of what comes later


@settings(max_examples=60, deadline=None)
@given(
    batch=st.integers(1, 4), heads=st.integers(1, 3), n=st.integers(1, 140), m=st.integers(1, 140),
    components=st.integers(2, 70), width=st.integers(1, 40), value_width=st.integers(1, 70),
    causal=st.booleans(), masked=st.booleans(), by_token=st.booleans(), seed=st.integers(0, 1000),
)  # fmt: skip
def test_any_shape_is_within_1e_5(n: int, m: int, causal: bool, **shape: int) -> None:
    case = make(n=n, m=n if causal else m, causal=causal, **shape)
    want = evaluate(case, "reference", torch.float64)
    got = evaluate(case, "native", torch.float32)
    direct = errors(evaluate(case, "reference", torch.float32), want)
    for mine, theirs in zip(errors(got, want), direct, strict=True):
        assert mine <= max(1e-5, 4 * theirs)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("width", [2, 8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_it_is_as_accurate_as_the_direct_form(kind: str, width: int, causal: bool) -> None:
    case = far(kind, width, causal)
    want = evaluate(case, "reference", torch.float64)
    direct = errors(evaluate(case, "reference", torch.float32), want)
    got = errors(evaluate(case, "native", torch.float32), want)
    for mine, theirs in zip(got, direct, strict=True):
        assert mine <= 4 * max(theirs, 2.5e-7)  # two units in the last place


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e3, 1e15, 1e30])
def test_finite_input_gives_finite_output(scale: float, causal: bool) -> None:
    case = make(n=70, causal=causal, masked=True)
    q, k, v, means, variances, priors = case.tensors
    case = case._replace(tensors=(q * scale, k, v, means, variances.clamp(max=1e-4), priors * 100))
    got = evaluate(case, "native", torch.float32)
    for value in got:
        assert value.isfinite().all()
    if scale > 2.0**36:  # more than float32 may bear: the plain form takes over, whole
        for a, b in zip(got, evaluate(case, "chunked", torch.float32), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_padding_contributes_nothing_whatever_it_holds(causal: bool) -> None:
    case = make(batch=1, n=100, causal=causal, masked=True)
    assert case.key_mask is not None
    want = evaluate(case, "native", torch.float32)
    poisoned = [t.clone() for t in case.tensors]
    for index, value in ((1, float("nan")), (2, float("inf"))):
        poisoned[index][~case.key_mask[:, None].expand(-1, 2, -1)] = value
    got = evaluate(case._replace(tensors=tuple(poisoned)), "native", torch.float32)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    padding = ~case.key_mask[:, None, :, None]
    assert (got[2] * padding).abs().max() == 0
    assert (got[3] * padding).abs().max() == 0


def test_nan_in_a_token_is_not_hidden() -> None:
    q, *rest = (t.float() for t in make(n=70).tensors)
    q[0, 0, 3] = float("nan")
    out = gma(q, *rest, backend="native")
    assert out[0, 0, 3].isnan().all()
    assert out[0, 1].isfinite().all()


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_results_do_not_depend_on_the_number_of_threads(causal: bool) -> None:
    case = make(batch=2, heads=3, n=5000, causal=causal)
    found = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.append(evaluate(case, "native", torch.float32))
    for other in found[1:]:
        for a, b in zip(found[0], other, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("layout", ["transposed", "expanded", "sliced"])
def test_any_strides_will_do(layout: str) -> None:
    tensors = [t.float() for t in make(n=64, width=8).tensors]
    if layout == "transposed":
        tensors[:3] = [t.transpose(2, 3).contiguous().transpose(2, 3) for t in tensors[:3]]
    elif layout == "expanded":
        tensors[:3] = [t[:1, :1].expand_as(t) for t in tensors[:3]]
    else:
        tensors[:3] = [t.repeat_interleave(2, -1)[..., ::2] for t in tensors[:3]]
    leaves = [t.requires_grad_() for t in tensors]
    found = {}
    for backend in ("native", "reference"):
        out = gma(*leaves, backend=backend)
        found[backend] = torch.autograd.grad(out.sum(), leaves)
    for a, b in zip(found["native"], found["reference"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_defaults_of_the_process_are_not_its_own() -> None:
    case = make(n=70)
    want = evaluate(case, "native", torch.float32)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):
            leaves = [t.to("cpu", torch.float32).requires_grad_() for t in case.tensors]
            got = gma(*leaves, backend="native")
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(got.detach().double(), want[0])


# ---------------------------------------------------------------- as an operator


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_operator_is_registered_as_torch_wants_it(causal: bool) -> None:
    case = make(n=70, causal=causal, masked=True)
    leaves = [t.float().requires_grad_() for t in case.tensors]
    torch.library.opcheck(torch.ops.gma_bench.gma_native, (*leaves, case.key_mask, causal, 1e-6))


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("n", [1, 70, 2100])
def test_fake_tensors_have_the_shapes_of_real_ones(causal: bool, n: int) -> None:
    tensors = [t.float() for t in make(n=n, causal=causal, by_token=True).tensors]
    real = torch.ops.gma_bench.gma_native(*tensors, None, causal, 1e-6)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(t) for t in tensors]
        fake = torch.ops.gma_bench.gma_native(*fakes, None, causal, 1e-6)
    for a, b in zip(real, fake, strict=True):
        assert a.shape == b.shape
        assert a.stride() == b.stride()


def test_one_graph_under_compile() -> None:
    leaves = [t.float().requires_grad_() for t in make(n=100, causal=True).tensors]
    call = torch.compile(lambda *a: gma(*a, causal=True) * 2, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(call(*leaves).sum(), leaves)
    want = torch.autograd.grad(gma(*leaves, causal=True, backend="native").sum() * 2, leaves)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_second_derivative_is_refused() -> None:
    leaves = [t.float().requires_grad_() for t in make(n=20).tensors]
    out = gma(*leaves, backend="native")
    (grad,) = torch.autograd.grad(out.sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
        grad.sum().backward()


def test_flops_are_counted_as_those_of_the_plain_form() -> None:
    leaves = [t.float().requires_grad_() for t in make(n=128).tensors]
    counts = []
    for backend in ("native", "chunked"):
        with FlopCounterMode(display=False) as counter:
            gma(*leaves, backend=backend).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


# ---------------------------------------------------------------- the library


def test_python_and_the_library_agree_on_what_they_share() -> None:
    code = native.library()
    for name in ("gma_state_tokens", "gma_call_bytes"):
        getattr(code, name).restype = ctypes.c_int64
    assert code.gma_state_tokens() == native.STATE_TOKENS
    assert code.gma_call_bytes() == ctypes.sizeof(native.Call)


@pytest.mark.parametrize("flags", [("-mno-avx512f",), ("-march=x86-64",)], ids=" ".join)
def test_vectors_of_other_processors_do_as_well(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if platform.machine() not in ("x86_64", "AMD64"):
        pytest.skip("flags of another architecture")
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, *flags))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    native.library.cache_clear()
    try:
        for form in ("odd sizes", "masked, by token", "causal, masked, by token", "many blocks"):
            test_it_is_within_1e_5(form)
        assert list(tmp_path.rglob("*.so"))
    finally:
        native.library.cache_clear()


def test_auto_takes_it_for_float32_on_a_cpu_alone() -> None:
    from gma_bench.ops import choose_backend

    case = make(n=8)
    assert choose_backend(*(t.float() for t in case.tensors)) == "native"
    assert choose_backend(*case.tensors) == "chunked"
    assert choose_backend(*(t.bfloat16() for t in case.tensors)) == "chunked"
    with pytest.raises(ValueError, match=r"backend='native': torch.float64 is not supported"):
        gma(*case.tensors, backend="native")


SCRIPT = """
import warnings
import torch
from gma_bench.ops import choose_backend, gma, native
from tests.ops.cases import make
tensors = [t.float() for t in make(n=8).tensors]
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    print(choose_backend(*tensors))
    choose_backend(*tensors)
print(float((gma(*tensors) - gma(*tensors, backend="chunked")).abs().max()) < 1e-5)
try:
    gma(*tensors, backend="native")
except ValueError as error:
    print(error)
else:
    print("native ran")
print(*(str(w.message) for w in said))
"""


def run_script(**environment: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=True,
        env={**os.environ, **environment}, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    return done.stdout.splitlines()


@pytest.mark.parametrize(
    ("command", "says"),
    [("no-such-compiler", "no C++ compiler was found"), ("false", "could not compile native.cpp")],
)
def test_without_a_compiler_auto_takes_plain_torch(command: str, says: str, tmp_path: Path) -> None:
    chosen, right, refusal, said = run_script(CXX=command, XDG_CACHE_HOME=str(tmp_path))
    assert (chosen, right) == ("chunked", "True")
    assert says in refusal
    assert said.count("GMA runs in plain torch on this CPU, half as fast") == 1
    assert "backend='chunked' takes any input" in refusal
    assert not list(tmp_path.rglob("*.so"))  # nothing half-written


@pytest.mark.parametrize("arguments", ["-m64", "-O1 -g0"])
def test_a_compiler_may_come_with_arguments(arguments: str, tmp_path: Path) -> None:
    """``CXX="ccache g++"`` or ``"g++ -m64"``, as build systems take it."""
    if platform.machine() != "x86_64" or shutil.which("g++") is None:
        pytest.skip("wants g++ on x86-64")
    said = run_script(CXX=f"g++ {arguments}", XDG_CACHE_HOME=str(tmp_path))
    assert said[2] == "native ran"
    assert len(list(tmp_path.rglob("*.so"))) == 1


def test_a_damaged_library_is_replaced_and_a_locked_folder_is_left(tmp_path: Path) -> None:
    home = str(tmp_path)
    assert run_script(XDG_CACHE_HOME=home)[2] == "native ran"
    (built,) = tmp_path.rglob("*.so")
    built.write_bytes(b"not a library")
    assert run_script(XDG_CACHE_HOME=home, TMPDIR=str(tmp_path))[2] == "native ran"
    file = tmp_path / "a file"
    file.touch()
    assert run_script(XDG_CACHE_HOME=str(file), TMPDIR=str(tmp_path))[2] == "native ran"
