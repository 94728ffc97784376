"""Verdicts: synthetic records of every outcome, for every claim of the paper."""

from __future__ import annotations

import math

import pytest

from gma_bench.errors import UserError
from gma_bench.report.claims import judge, judge_all, markdown, number, side
from gma_bench.report.paper import DEFAULT, Paper, read_paper
from gma_bench.report.stats import Interval, bootstrap_interval, mean_interval, t_interval
from gma_bench.report.tables import Results

PAPER = read_paper(DEFAULT.parent)
IDS = [claim["id"] for claim in PAPER.claims]
OUTCOMES = ["reproduced", "contradicted", "inconclusive", "not run"]
LINEAR = ("linformer", "linear_transformer", "performer")


def verdict(records, claim_id, scale="mini"):
    claim = next(c for c in PAPER.claims if c["id"] == claim_id)
    return judge(Results(scale, records, [], PAPER), claim)


# Values over seeds: clearly above and below 100, and one that three seeds leave open.
ABOVE, BELOW, OPEN = (110.0, 111.0, 110.5), (90.0, 91.0, 90.5), (101.0, 99.0, 100.2)


def language(synthetic, values, rivals):
    made = [_lm(synthetic, rival, s, 100.0) for rival in rivals for s in range(3)]
    return made + [_lm(synthetic, "gma", s, v) for s, v in enumerate(values)]


def _lm(synthetic, mixer, seed, value):
    return synthetic("wikitext103", mixer, seed, value=value, metric="perplexity", split="val")


def arena(synthetic, values):
    """Only the average separates: GMA is as far above on one task as below on the other."""
    made = []
    for task, offset in (("listops", 0.2), ("text", -0.2)):
        made += [synthetic(task, rival, s, value=1 + offset) for rival in LINEAR for s in range(3)]
        made += [synthetic(task, "gma", s, value=v / 100 + offset) for s, v in enumerate(values)]
    return made


def memory(synthetic, mixer, exponent, noise=0.0, lengths=(256, 1024, 4096, 16384, 65536, 262144)):
    rows = [
        {
            "sweep": "length", "scope": "layer", "pass": "forward_backward", "method": "simulated",
            "seq_len": n, "status": "ok",
            "peak_bytes": int(1000 * n**exponent * (1 + noise * (-1) ** i)),
        } for i, n in enumerate(lengths)
    ]  # fmt: skip
    return [synthetic("memory", mixer, rows=rows, value=exponent, metric="memory_slope")]


def throughput(
    synthetic, ratios, backend="reference", lengths=(256, 512, 1024, 2048), device="cuda"
):
    """Times over SDPA's: 1 for the rivals, ``ratios`` for GMA."""
    how = {
        "sweep": "length", "scope": "layer", "pass": "forward_backward", "status": "ok",
        "device": device,
    }  # fmt: skip
    made = []
    for mixer in ("sdpa", "linear_transformer", "mamba"):
        rows = [how | {"seq_len": n, "ratio": 1.0} for n in lengths]
        made.append(synthetic("throughput", mixer, rows=rows, value=None))
    rows = [
        how | {"seq_len": n, "ratio": ratio, "backend": backend}
        for n, ratio in zip(lengths, ratios, strict=True)
    ]
    return [*made, synthetic("throughput", "gma", rows=rows, value=None)]


def interpretability(synthetic, seeds=3, **figures):
    """Records whose figures are numbers, or one number a seed."""
    return [
        synthetic(
            "interpretability", "gma", s, value=None, metric="nmi", split="val",
            metrics={"val": {k: v[s] if isinstance(v, tuple) else v for k, v in figures.items()}},
        ) for s in range(seeds)
    ]  # fmt: skip


def usage(synthetic, fraction, entropy):
    return interpretability(synthetic, components_in_use_fraction=fraction, usage_entropy=entropy)


def alignment(synthetic, nmi, permuted=0.02, **more):
    return interpretability(synthetic, nmi=nmi, nmi_permuted=permuted, **more)


def affinity(synthetic, rank, least, length=256):
    return interpretability(
        synthetic, affinity_rank_max=rank, num_components=64, affinity_min=least,
        affinity_length=length,
    )  # fmt: skip


def gradients(synthetic, most):
    return interpretability(
        synthetic, gradient_norm_max=most, gradient_norm_other_max=20.0, gradient_nonfinite_steps=0
    )


def lipschitz(synthetic, empirical, bound=5.0):
    return interpretability(synthetic, lipschitz_empirical=empirical, lipschitz_bound=bound)


BEATEN, AHEAD = ("linear_transformer", "performer"), ("sdpa", "mamba")
CASES = {
    "memory-linear": (
        lambda s: memory(s, "gma", 1.0),
        lambda s: memory(s, "gma", 1.5),
        lambda s: memory(s, "gma", 1.0, noise=0.5),
        lambda s: memory(s, "mha", 2.0),
    ),
    "memory-quadratic": (
        lambda s: memory(s, "mha", 2.0),
        lambda s: memory(s, "mha", 1.0),
        lambda s: memory(s, "mha", 2.0, lengths=(256, 512, 1024)),
        lambda s: memory(s, "gma", 1.0),
    ),
    "lra-average": (
        lambda s: arena(s, ABOVE),
        lambda s: arena(s, BELOW),
        lambda s: arena(s, OPEN),
        lambda s: [r for r in arena(s, ABOVE) if r["mixer"] != "performer"],
    ),
    "lm-beats-linear": (
        lambda s: language(s, BELOW, BEATEN),
        lambda s: language(s, ABOVE, BEATEN),
        lambda s: language(s, OPEN, BEATEN),
        lambda s: language(s, BELOW, ["performer"]),
    ),
    "lm-behind-sdpa-mamba": (
        lambda s: language(s, ABOVE, AHEAD),
        lambda s: language(s, BELOW, AHEAD),
        lambda s: language(s, ABOVE[:2], AHEAD),  # two seeds decide nothing
        lambda s: [r for r in language(s, ABOVE, AHEAD) if r["mixer"] != "gma"],
    ),
    "throughput-behind": (
        lambda s: throughput(s, (1.5, 2.0, 3.0, 2.0)),
        lambda s: throughput(s, (0.1, 0.2, 0.3, 0.4)),
        lambda s: throughput(s, (0.3, 0.9, 1.2, 4.0)),
        lambda s: throughput(s, (1.5, 2.0, 3.0, 2.0), backend="chunked"),
    ),
    "usage-broad": (
        lambda s: usage(s, (0.8, 0.82, 0.81), (0.93, 0.94, 0.935)),
        lambda s: usage(s, (0.1, 0.12, 0.11), (0.4, 0.42, 0.41)),
        lambda s: usage(s, (0.8, 0.82, 0.81), (0.6, 0.95, 0.9)),
        lambda s: usage(s, 0.8, None),
    ),
    "categories-moderate": (
        lambda s: alignment(s, (0.24, 0.25, 0.245)),
        lambda s: alignment(s, (0.71, 0.72, 0.73)),
        lambda s: alignment(s, (0.12, 0.25, 0.35)),
        lambda s: usage(s, 0.8, 0.9),
    ),
    "affinity-rank": (
        lambda s: affinity(s, 64, 0.0),
        lambda s: affinity(s, (64, 65, 64), 0.0),
        lambda s: affinity(s, 60, 0.0, length=60),  # a 60 × 60 matrix has no larger rank
        lambda s: usage(s, 0.8, 0.9),
    ),
    "gradients-bounded": (
        lambda s: gradients(s, 9.0),
        lambda s: gradients(s, (9.0, None, 9.0)),  # NaN and infinity are null in a record
        None,  # an inequality holds or does not
        lambda s: usage(s, 0.8, 0.9),
    ),
    "routing-lipschitz": (
        lambda s: lipschitz(s, 4.9),
        lambda s: lipschitz(s, (4.9, 5.1, 4.8)),
        None,
        lambda s: usage(s, 0.8, 0.9),
    ),
}


def test_every_claim_of_the_paper_has_cases():
    assert list(CASES) == IDS


@pytest.mark.parametrize(
    ("claim_id", "outcome"),
    [
        (claim_id, outcome) for claim_id, cases in CASES.items()
        for outcome, case in zip(OUTCOMES, cases, strict=True) if case
    ],
)  # fmt: skip
def test_outcomes(synthetic, claim_id, outcome):
    make = CASES[claim_id][OUTCOMES.index(outcome)]
    found = verdict(make(synthetic), claim_id)
    assert found.outcome == outcome, found.effects
    if outcome in ("reproduced", "contradicted"):
        known = {r["run_id"] for r in make(synthetic)}
        assert found.records
        assert set(found.records) <= known
        assert found.deciding.interval is not None or found.deciding.why == "not finite"


@pytest.mark.parametrize("claim_id", IDS)
def test_without_records_nothing_is_judged(claim_id):
    found = verdict([], claim_id)
    assert found.outcome == "not run"
    assert found.notes == []


def test_below_the_papers_scale_says_so(synthetic):
    assert "below the paper’s scale" in verdict(arena(synthetic, ABOVE), "lra-average").notes[0]
    records = [r | {"scale": "paper"} for r in arena(synthetic, ABOVE)]
    assert verdict(records, "lra-average", "paper").notes == []


def test_seeds_are_paired(synthetic):
    """Seeds move every mixer alike; only the differences decide."""
    records = []
    for seed, level in enumerate((50.0, 100.0, 200.0)):
        records += [_lm(synthetic, rival, seed, level) for rival in BEATEN]
        records.append(_lm(synthetic, "gma", seed, level * (0.9 + seed * 1e-3)))
    found = verdict(records, "lm-beats-linear")
    assert found.outcome == "reproduced"
    assert found.deciding.interval.estimate == pytest.approx(0.901, abs=1e-3)


def test_cells_that_do_not_compare_decide_nothing(synthetic):
    """A longer training of GMA is no evidence that it is better."""
    records = [_lm(synthetic, rival, s, 100.0) for rival in BEATEN for s in range(3)]
    for seed in range(3):
        made = synthetic(
            "wikitext103", "gma", seed, value=90.0 + seed / 10, metric="perplexity", split="val",
            settings={"training": {"steps": 9999}},
        )  # fmt: skip
        records.append(made)
    found = verdict(records, "lm-beats-linear")
    assert found.outcome == "inconclusive"
    assert "training.steps" in found.deciding.why


def test_a_rival_without_the_kernel_that_the_claim_names_decides_nothing(synthetic):
    """Mamba on a CPU is a scan of torch's operators: slower or faster than that says nothing of its kernel."""
    for ratios in ((1.5, 2.0, 3.0, 2.0), (0.1, 0.2, 0.3, 0.4)):
        found = verdict(throughput(synthetic, ratios, device="cpu"), "throughput-behind")
        (mamba,) = [effect for effect in found.effects if "Mamba" in effect.name]
        assert mamba.outcome == "inconclusive"
        assert "kernel on cuda alone, not on cpu" in mamba.why
    assert found.outcome == "contradicted"  # by the others
    assert "Mamba" not in found.deciding.name


def test_a_failed_seed_is_named_and_leaves_its_pair_out(synthetic, make_failed):
    records = [r for r in arena(synthetic, ABOVE) if (r["mixer"], r["seed"]) != ("performer", 2)]
    records += [make_failed(task, "performer", 2) for task in ("listops", "text")]
    found = verdict(records, "lra-average")
    assert found.outcome == "inconclusive"
    assert "Performer on ListOps has no result for seed 2" in found.deciding.why


def test_a_record_without_seeds_may_bring_its_own_interval(synthetic):
    made = interpretability(
        synthetic, seeds=1, nmi=0.24, nmi_low=0.2, nmi_high=0.28, nmi_permuted=0.02
    )
    assert verdict(made, "categories-moderate").outcome == "reproduced"
    wide = interpretability(
        synthetic, seeds=1, nmi=0.24, nmi_low=0.1, nmi_high=0.38, nmi_permuted=0.02
    )
    assert verdict(wide, "categories-moderate").outcome == "inconclusive"


def test_t_interval_matches_the_textbook():
    """Student's example of one sample: mean 2, s = 1, n = 3, t(0.975, 2) = 4.3027."""
    interval = t_interval([1.0, 2.0, 3.0])
    assert interval.high - interval.estimate == pytest.approx(4.30265 / math.sqrt(3), rel=1e-5)
    assert t_interval([1.0]).low is None


def test_bootstrap_is_reproducible_and_covers_the_mean():
    values = [1.0, 2.0, 4.0, 8.0]
    first, second = bootstrap_interval(values), bootstrap_interval(values)
    assert first == second
    assert first.low < 3.75 < first.high
    assert first.low >= 1.0
    assert first.high <= 8.0


def test_a_handful_gets_the_wider_interval():
    few, many = [1.0, 2.0, 3.0], [1.0, 2.0, 3.0] * 5
    assert mean_interval(few) == t_interval(few)
    assert mean_interval(many) == bootstrap_interval(many)


def test_sides_of_a_range():
    assert side(Interval(1, 0.5, 1.5, 3, ""), 0, 2) == "reproduced"
    assert side(Interval(3, 2.5, 3.5, 3, ""), 0, 2) == "contradicted"
    assert side(Interval(2, 1.5, 2.5, 3, ""), 0, 2) == "inconclusive"
    assert side(Interval(1, None, None, 1, ""), 0, 2) == "inconclusive"


def test_an_unknown_kind_is_one_clear_error():
    paper = Paper(claims=[{"id": "x", "statement": "y", "kind": "vibes"}], rules=PAPER.rules)
    with pytest.raises(UserError, match="claim x in paper"):
        judge_all(Results("mini", [], [], paper))


def test_markdown_names_the_verdict(synthetic):
    text = markdown([verdict(arena(synthetic, ABOVE), "lra-average")], "Scale mini.")
    assert "**reproduced**" in text
    assert "GMA − Performer" in text


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.00"),
        (0.9996, "1.00"),
        (0.93456, "0.935"),
        (41.72, "41.7"),
        (12345.6, "12346"),
        (-1e-6, "−1.00e−06"),
    ],
)
def test_numbers_are_short(value, shown):
    assert number(value) == shown
