"""The chunked backend is the reference: outputs and gradients, in every form and surrounding."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from gma_bench.ops import blocks, chunked, gma, reference, responsibilities
from tests.ops.cases import FORMS, KINDS, Case, errors, evaluate, far, make


@pytest.mark.parametrize("form", FORMS)
def test_float64_equals_the_reference(form: str) -> None:
    case = make(**FORMS[form])
    want = evaluate(case, "reference", torch.float64)
    got = evaluate(case, "chunked", torch.float64)
    for error, reached in zip(errors(got, want), want, strict=True):
        assert error < 1e-10 or reached.abs().max() < 1e-12  # one component has no gradient


@settings(max_examples=40, deadline=None)
@given(
    batch=st.integers(1, 4), heads=st.integers(1, 3), n=st.integers(1, 140), m=st.integers(1, 140),
    components=st.integers(2, 12), width=st.integers(1, 9), value_width=st.integers(1, 9),
    causal=st.booleans(), masked=st.booleans(), by_token=st.booleans(),
    spread=st.floats(0.01, 30), log_variance=st.floats(-4, 6), seed=st.integers(0, 1000),
)  # fmt: skip
def test_float64_equals_the_reference_everywhere(
    n: int, m: int, causal: bool, spread: float, log_variance: float, **shape: int
) -> None:
    case = make(n=n, m=n if causal else m, causal=causal, **shape)
    q, k, v, means, variances, priors = case.tensors
    case = case._replace(
        tensors=(q * spread, k * spread, v, means * spread, variances * 2.0**log_variance, priors)
    )
    want = evaluate(case, "reference", torch.float64)
    got = evaluate(case, "chunked", torch.float64)
    # gradients that cancel to nothing are measured against what they are sums of
    scale = [
        1e-3,
        *[1e-3 / (0.2 * 2.0**log_variance) ** 0.5 * i for i in (1, 1)],
        1e-3,
        *[1e-2] * 3,
    ]
    for a, b, floor in zip(got, want, scale, strict=True):
        assert (a - b).abs().max() <= 1e-10 * max(float(b.abs().max()), floor)


@pytest.mark.parametrize("form", FORMS)
def test_float32_is_within_1e_5(form: str) -> None:
    case = make(**FORMS[form])
    want = evaluate(case, "reference", torch.float64)
    got = evaluate(case, "chunked", torch.float32)
    assert max(errors(got, want)) < 1e-5
    assert not got[0][want[0] == 0].any()  # where nothing is read, no rounding of what comes later


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["masked", "causal", "cross-attention"])
def test_low_precision_tokens_are_within_1e_2(form: str, dtype: torch.dtype) -> None:
    case = make(**FORMS[form])
    tokens = [t.to(dtype).double() for t in case.tensors[:3]]  # what is lost before the call
    case = case._replace(tensors=(*tokens, *case.tensors[3:]))
    want = evaluate(case, "reference", torch.float64, upstream_dtype=dtype)
    got = evaluate(case, "chunked", torch.float32, token_dtype=dtype)
    assert max(errors(got, want)) < 1e-2


def test_output_has_the_dtype_of_the_values_and_logits_have_float32() -> None:
    case = make()
    q, k, v, *mixture = (t.bfloat16() for t in case.tensors)
    assert gma(q, k, v, *mixture).dtype == torch.bfloat16
    assert responsibilities(q, *mixture).dtype == torch.float32


# ---------------------------------------------------------------- accuracy far from the origin


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("width", [2, 8, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_float32_is_as_accurate_as_the_direct_form(kind: str, width: int, causal: bool) -> None:
    case = far(kind, width, causal)
    want = evaluate(case, "reference", torch.float64)
    direct = errors(evaluate(case, "reference", torch.float32), want)
    got = errors(evaluate(case, "chunked", torch.float32), want)
    for mine, theirs in zip(got, direct, strict=True):
        assert mine <= 4 * max(theirs, 2.5e-7)  # two units in the last place


def test_the_wide_path_is_taken_where_it_is_needed_and_not_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = []
    original = blocks.Mixture.wide.fget
    monkeypatch.setattr(
        blocks.Mixture, "wide", property(lambda self: taken.append(1) or original(self))
    )
    q, k, v, means, variances, priors = make(n=200, width=32).tensors
    evaluate(Case((q, k, v, means, variances + 32, priors)), "chunked", torch.float32)
    assert not taken
    evaluate(far("far from the origin", 8, False), "chunked", torch.float32)
    assert taken


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1e3, 1e15, 1e30])
def test_finite_input_gives_finite_output(scale: float, causal: bool) -> None:
    case = make(n=70, causal=causal, masked=True)
    q, k, v, means, variances, priors = case.tensors
    tensors = q * scale, k, v, means, variances.clamp(max=1e-4), priors * 100
    for value in evaluate(case._replace(tensors=tensors), "chunked", torch.float32):
        assert value.isfinite().all()


# ---------------------------------------------------------------- masks


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_padding_contributes_nothing_whatever_it_holds(causal: bool) -> None:
    case = make(batch=1, n=100, causal=causal, masked=True)
    assert case.key_mask is not None
    want = evaluate(case, "chunked", torch.float64)
    poisoned = [t.clone() for t in case.tensors]
    for index, value in ((1, float("nan")), (2, float("inf"))):
        poisoned[index][~case.key_mask[:, None].expand(-1, 2, -1)] = value
    got = evaluate(case._replace(tensors=tuple(poisoned)), "chunked", torch.float64)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    padding = ~case.key_mask[:, None, :, None]
    assert (got[2] * padding).abs().max() == 0
    assert (got[3] * padding).abs().max() == 0


def test_a_row_masked_whole_gives_zeros() -> None:
    case = make(n=70, masked=True)
    out, grad_q, *_ = evaluate(case, "chunked", torch.float32)
    assert case.key_mask is not None
    assert not case.key_mask[0].any()
    assert out[0].abs().max() == 0
    assert grad_q[0].abs().max() == 0


def test_a_later_token_does_not_reach_an_earlier_one() -> None:
    case = make(n=200, causal=True)
    want = gma(*case.tensors, causal=True)
    changed = [t.clone() for t in case.tensors]
    for tensor in changed[:3]:
        tensor[:, :, 150:] += 1
    got = gma(*changed, causal=True)
    assert torch.equal(got[:, :, :150], want[:, :, :150])
    assert not torch.equal(got[:, :, 150:], want[:, :, 150:])


# ---------------------------------------------------------------- as an operator


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_operator_is_registered_as_torch_wants_it(causal: bool) -> None:
    case = make(n=70, causal=causal, masked=True)
    leaves = [t.requires_grad_() for t in case.tensors]
    torch.library.opcheck(torch.ops.gma_bench.gma, (*leaves, case.key_mask, causal, 1e-6))


def test_responsibilities_are_an_operator_too() -> None:
    case = make(n=70)
    q, _, _, *mixture = (t.requires_grad_() for t in case.tensors)
    torch.library.opcheck(torch.ops.gma_bench.responsibilities, (q, *mixture))
    want = reference.responsibilities(q, *mixture)
    upstream = torch.randn_like(want)
    got = responsibilities(q, *mixture)
    torch.testing.assert_close(got, want)
    for a, b in zip(
        torch.autograd.grad(got, (q, *mixture), upstream),
        torch.autograd.grad(want, (q, *mixture), upstream), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(a, b)


def test_responsibilities_are_those_of_an_independent_implementation() -> None:
    mixture_module = pytest.importorskip("sklearn.mixture")
    case = make(batch=1, heads=1, n=50)
    q, _, _, means, variances, priors = case.tensors
    model = mixture_module.GaussianMixture(means.shape[1], covariance_type="diag")
    model.means_, model.covariances_ = means[0].numpy(), variances[0].numpy()
    model.weights_ = priors[0].exp().numpy()
    model.precisions_cholesky_ = variances[0].rsqrt().numpy()
    want = torch.from_numpy(model.predict_proba(q[0, 0].numpy()))
    torch.testing.assert_close(responsibilities(q, means, variances, priors)[0, 0], want)


def test_one_graph_under_compile() -> None:
    case = make(n=100, causal=True)
    leaves = [t.float().requires_grad_() for t in case.tensors]
    call = torch.compile(lambda *a: gma(*a, causal=True) * 2, fullgraph=True, backend="aot_eager")
    got = torch.autograd.grad(call(*leaves).sum(), leaves)
    want = torch.autograd.grad(gma(*leaves, causal=True).sum() * 2, leaves)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b)


def test_autocast_and_tf32_leave_it_alone() -> None:
    case = make(n=100)
    tensors = [t.float() for t in case.tensors]
    want = gma(*tensors)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            got = gma(*tensors)
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert got.dtype == torch.float32
    assert torch.equal(got, want)


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_fake_tensors_have_the_shapes_of_real_ones(causal: bool) -> None:
    case = make(n=300, causal=causal, by_token=True)
    real = torch.ops.gma_bench.gma(*case.tensors, None, causal, 1e-6)
    with FakeTensorMode() as mode:
        fake = torch.ops.gma_bench.gma(
            *(mode.from_tensor(t) for t in case.tensors), None, causal, 1e-6
        )
        inside = chunked.gma_body(*(mode.from_tensor(t) for t in case.tensors), None, causal, 1e-6)
    for a, b, c in zip(real, fake, inside, strict=True):
        assert a.shape == b.shape == c.shape
        assert a.stride() == b.stride() == c.stride()


def test_second_derivative_is_refused() -> None:
    case = make(n=20)
    leaves = [t.requires_grad_() for t in case.tensors]
    (grad,) = torch.autograd.grad(gma(*leaves).sum(), leaves[0], create_graph=True)
    with pytest.raises(RuntimeError, match=r"no second derivative.*backend='reference'"):
        grad.sum().backward()


@pytest.mark.parametrize("backend", ["chunked", "auto"])
def test_forward_mode_is_refused(backend: str) -> None:
    q, *rest = (t.float() if backend == "auto" else t for t in make(n=20).tensors)
    with pytest.raises(RuntimeError, match=r"no forward-mode.*backend='reference'"):
        torch.func.jvp(lambda x: gma(x, *rest, backend=backend), (q,), (q,))
    _, tangent = torch.func.jvp(lambda x: gma(x, *rest, backend="reference"), (q,), (q,))
    assert tangent.abs().max() > 1e-3


@pytest.mark.parametrize("causal", [False, True], ids=["bidirectional", "causal"])
def test_flops_are_those_of_the_products_inside(causal: bool) -> None:
    case = make(batch=1, n=4 * blocks.CHUNK, causal=causal)
    leaves = [t.requires_grad_() for t in case.tensors]
    with FlopCounterMode(display=False) as outside:
        gma(*leaves, causal=causal).sum().backward()
    tensors = [t.detach() for t in case.tensors]

    def product(total: list[int], a: list[int], b: list[int], **_: object) -> int:
        return 2 * a[0] * a[1] * a[2] * b[2]

    in_place = {torch.ops.aten.baddbmm_: product}  # torch counts the other variants alone
    with FlopCounterMode(display=False, custom_mapping=in_place) as inside:
        out, *kept = chunked.gma_body(*tensors, None, causal, 1e-6)
        chunked.gma_backward_body(out, *tensors, None, *kept, causal, 1e-6)
    # inside there are small products besides: scans and row sums
    assert outside.get_total_flops() <= inside.get_total_flops() <= 1.1 * outside.get_total_flops()


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"causal": True}, "N = M"),
        ({"eps": 0.0}, "positive"),
        ({"backend": "cuda"}, "must be one of auto, reference, chunked, native, triton"),
        ({"key_mask": torch.ones(2, 41)}, "bool"),
        ({"key_mask": torch.ones(2, 3, dtype=torch.bool)}, "key_mask"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_wrong_arguments_are_named(change: dict[str, object], message: str) -> None:
    case = make(n=40, m=41)
    with pytest.raises(ValueError, match=message):
        gma(*case.tensors, **change)  # type: ignore[arg-type]


def test_wrong_shapes_are_named() -> None:
    q, k, v, means, variances, priors = make().tensors
    for wrong in (
        (q, k, v[:, :, 1:], means, variances, priors), (q, k, v, means, variances[1:], priors),
        (q, k, v, means, variances, priors[:, 1:]), (q[..., 1:], k, v, means, variances, priors),
        (q, k, v[..., :0], means, variances, priors),
        (q, k, v, means[:, :0], variances[:, :0], priors[:, :0]),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=r"\("):
            gma(*wrong)
