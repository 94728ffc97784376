"""The paper's claims judged on records, by the rules that ``results/paper.yaml`` states."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from gma_bench.errors import UserError
from gma_bench.report.groups import (
    Group,
    Record,
    average,
    differences,
    is_number,
    metric_of,
    paired,
)
from gma_bench.report.profile_tables import FIGURE_NAMES, REFERENCE_MIXER
from gma_bench.report.profiles import profile, relative_times
from gma_bench.report.stats import FEW, Interval, mean_interval, t_interval
from gma_bench.report.tables import Results
from gma_bench.results import growth

Outcome = Literal["reproduced", "contradicted", "inconclusive", "not run"]
REPRODUCED: Outcome = "reproduced"
CONTRADICTED: Outcome = "contradicted"
INCONCLUSIVE: Outcome = "inconclusive"
NOT_RUN: Outcome = "not run"
Claim = dict[str, Any]


@dataclass
class Effect:
    """One part of a claim: a quantity, its interval, and what they say.

    Attributes:
        name: what was compared or fitted.
        outcome: of this part.
        interval: estimate and ends; None where there is nothing to estimate from.
        unit: of the estimate.
        expected: what the claim says of it.
        borders: the range that the claim allows, where that is one.
        why: one clause on why it decides nothing, or what else a reader should know.
        records: run ids behind it.
    """

    name: str
    outcome: Outcome
    interval: Interval | None = None
    unit: str = ""
    expected: str = ""
    why: str = ""
    records: list[str] = field(default_factory=list)
    borders: tuple[float, float] | None = None

    @property
    def shown(self) -> str:
        """``GMA − Performer: 3.1 percentage points [2.2, 4.0], n = 3``."""
        if self.interval is None:
            return f"{self.name}: {self.why}"
        i = self.interval
        ends = f" [{number(i.low)}, {number(i.high)}]" if i.low is not None else ""
        unit = f" {self.unit}" if self.unit else ""
        why = f"; {self.why}" if self.why else ""
        return f"{self.name}: {number(i.estimate)}{unit}{ends}, n = {i.n}{why}"


@dataclass
class Verdict:
    """What the records say of a claim."""

    id: str
    statement: str
    outcome: Outcome
    rule: str
    effects: list[Effect]
    notes: list[str] = field(default_factory=list)

    @property
    def records(self) -> list[str]:
        """Every run id behind the verdict."""
        return sorted({run for effect in self.effects for run in effect.records})

    @property
    def deciding(self) -> Effect:
        """The part that the verdict hangs on: the first with the verdict's own outcome."""
        return next((e for e in self.effects if e.outcome == self.outcome), self.effects[0])

    def as_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {
            "id": self.id, "statement": self.statement, "verdict": self.outcome, "rule": self.rule,
            "effects": [_json(effect) for effect in self.effects], "notes": self.notes,
            "records": self.records,
        }  # fmt: skip


def _json(effect: Effect) -> dict[str, Any]:
    content = asdict(effect)
    ends = effect.borders or ()
    content["borders"] = [end if math.isfinite(end) else None for end in ends] or None
    return content


def number(value: float | None) -> str:
    """Three significant digits, without an exponent where one can do without."""
    if value is None:
        return "—"
    if value == 0 or 1e-3 <= abs(value) < 1e5:
        rounded = abs(float(f"{value:.2e}"))  # 0.9996 has the decimals of 1.00, not of 0.999
        digits = 2 if value == 0 else max(0, 2 - math.floor(math.log10(rounded)))
        return f"{value:.{digits}f}".replace("-", "−")
    return f"{value:.2e}".replace("-", "−")


def judge_all(results: Results) -> list[Verdict]:
    """Every claim of the paper, in its order."""
    return [judge(results, claim) for claim in results.paper.claims]


def judge(results: Results, claim: Claim) -> Verdict:
    """One claim.

    Raises:
        UserError: the claim is of no known kind or lacks a parameter.
    """
    try:
        effects, rule = KINDS[claim["kind"]](results, claim)
    except KeyError as error:
        raise UserError(
            f"claim {claim.get('id')} in paper.yaml: {error} is missing or unknown; "
            f"kinds are {', '.join(KINDS)}"
        ) from error
    notes = []
    outcome = combine(effect.outcome for effect in effects)
    if outcome != NOT_RUN and results.below_paper:
        notes.append(f"judged below the paper’s scale (scale {results.scale})")
    return Verdict(claim["id"], claim["statement"], outcome, rule, effects, notes)


def combine(outcomes: Iterable[Outcome]) -> Outcome:
    """The verdict of a claim from those of its parts, all of which it asserts."""
    found = set(outcomes)
    for outcome in (NOT_RUN, CONTRADICTED, INCONCLUSIVE):
        if outcome in found:
            return outcome
    return REPRODUCED


def side(interval: Interval, low: float, high: float) -> Outcome:
    """Where an interval lies: inside ``[low, high]``, outside of it, or over a border."""
    if interval.low is None or interval.high is None:
        return INCONCLUSIVE
    if low <= interval.low and interval.high <= high:
        return REPRODUCED
    if interval.high < low or interval.low > high:
        return CONTRADICTED
    return INCONCLUSIVE


# ------------------------------------------------------------------------------------- ranking


def ranking(results: Results, claim: Claim) -> tuple[list[Effect], str]:
    """A mixer is above (or below) others in a metric, or in the mean of several."""
    effects = [_against(results, claim, rival) for rival in claim["than"]]
    percent = _percent(results)
    rule = (
        f"{claim['relation']} than each, paired over seeds, {percent} t interval; at least "
        f"{results.paper.rules['min_seeds']} pairs"
    )
    return effects, rule


def _against(results: Results, claim: Claim, rival: str) -> Effect:
    label = results.paper.label
    ratio = claim["effect"] == "ratio"
    name = f"{claim['of']}, {label(claim['mixer'])} {'/' if ratio else '−'} {label(rival)}"
    ours, theirs = [
        [results.main(figure["task"], mixer) for figure in claim["figures"]]
        for mixer in (claim["mixer"], rival)
    ]
    columns = [_column(groups, claim["figures"]) for groups in (ours, theirs)]
    absent = [label(m) for m, c in zip((claim["mixer"], rival), columns, strict=True) if not c]
    if absent:
        return Effect(name, NOT_RUN, why=f"no finished record of {' and '.join(absent)}")
    pairs = paired(*columns)
    found = [g for g in (*ours, *theirs) if g]
    records = [r["run_id"] for g in found for r in g.finished if r["seed"] in pairs]
    if not pairs:
        return Effect(name, INCONCLUSIVE, why="no seed that both finished")
    values = [
        (math.log(a) - math.log(b)) if ratio else (a - b) * claim.get("factor", 1)
        for a, b in pairs.values()
    ]
    rules, rivals = results.paper.rules, len(claim["than"])
    interval = t_interval(values, rules["confidence"])
    stricter = t_interval(values, 1 - (1 - rules["confidence"]) / rivals)
    outcome = _ranked(interval, stricter, claim["relation"])
    why = _caveat(results, ours, theirs, len(pairs))
    if len(pairs) < rules["min_seeds"] or "do not compare" in why:
        outcome = INCONCLUSIVE
    border = 1.0 if ratio else 0.0
    higher = claim["relation"] == "higher"
    borders = (border, math.inf) if higher else (-math.inf, border)
    return Effect(
        name, outcome, interval.mapped(math.exp) if ratio else interval, claim.get("unit", ""),
        f"{'above' if higher else 'below'} {border:g}", why, records, borders,
    )  # fmt: skip


def _column(groups: list[Group | None], figures: list[dict[str, str]]) -> dict[int, float]:
    if any(found is None for found in groups):
        return {}
    return average(
        *(g.by_seed(f["split"], f["metric"]) for g, f in zip(groups, figures, strict=True) if g)
    )


def _ranked(interval: Interval, stricter: Interval, relation: str) -> Outcome:
    if not interval.known:
        return INCONCLUSIVE
    claimed = side(interval, 0, math.inf) if relation == "higher" else side(interval, -math.inf, 0)
    against = side(stricter, 0, math.inf) if relation == "higher" else side(stricter, -math.inf, 0)
    if claimed == REPRODUCED:
        return REPRODUCED
    return CONTRADICTED if against == CONTRADICTED else INCONCLUSIVE


def _caveat(
    results: Results, ours: list[Group | None], theirs: list[Group | None], pairs: int
) -> str:
    """What keeps two mixers' cells from comparing, or what to know when they do."""
    parts = []
    for one, other in zip(ours, theirs, strict=True):
        assert one is not None
        assert other is not None
        apart = _apart(results, one, other)
        if apart:
            parts.append(f"cells do not compare ({apart})")
        for found in (one, other):
            lost = [str(r["seed"]) for r in found.records if r["status"] != "finished"]
            if lost:
                parts.append(
                    f"{results.paper.label(found.mixer)} on {results.paper.label(found.task)} "
                    f"has no result for seed {', '.join(lost)}"
                )
    if pairs < results.paper.rules["min_seeds"]:
        parts.append(f"{pairs} paired seed{'s' if pairs > 1 else ''}, too few")
    return "; ".join(parts)


def _apart(results: Results, one: Group, other: Group) -> str:
    watched = tuple(results.paper.rules["comparable"])
    changed = [
        name for name in differences(one.config, other.config)
        if any(name == w or name.startswith(f"{w}.") for w in watched)
    ]  # fmt: skip
    if one.fingerprint != other.fingerprint:
        changed.append("data")
    return ", ".join(changed)


# -------------------------------------------------------------------------------------- growth


def growing(results: Results, claim: Claim) -> tuple[list[Effect], str]:
    """A quantity grows as a power of sequence length."""
    confidence = results.paper.rules["confidence"]
    expected, tolerance = float(claim["exponent"]), float(claim["tolerance"])
    name = f"{results.paper.label(claim['mixer'])}, exponent of {_plain(claim['quantity'])} in N"
    rule = (
        f"slope on log–log axes, {_percent(results)} t interval within {expected:g} ± "
        f"{tolerance:g}; at least {claim['min_points']} lengths"
    )
    rows, records = profile(results, claim["task"], claim["mixer"], claim.get("where", {}))
    quantity = claim["quantity"]
    points = [
        (row["seq_len"], row[quantity]) for row in rows
        if is_number(row.get(quantity)) and is_number(row.get("seq_len"))
    ]  # fmt: skip
    fitted = growth.fit([x for x, _ in points], [y for _, y in points], confidence=confidence)
    if fitted is None:
        return [Effect(name, NOT_RUN, why="no finished profile with two lengths")], rule
    interval = Interval(fitted.slope, fitted.low, fitted.high, fitted.points, "slope, t")
    borders = (expected - tolerance, expected + tolerance)
    outcome = side(interval, *borders)
    why = f"N from {fitted.from_x:,.0f} to {fitted.to_x:,.0f}"
    if fitted.points < claim["min_points"]:
        outcome, why = INCONCLUSIVE, f"{fitted.points} lengths in the upper half, too few"
    shown = f"{expected:g} ± {tolerance:g}"
    return [Effect(name, outcome, interval, "", shown, why, records, borders)], rule


# --------------------------------------------------------------------------------------- speed


def speed(results: Results, claim: Claim) -> tuple[list[Effect], str]:
    """A mixer takes more time than others, length by length."""
    where = dict(claim["where"])
    rule = (
        f"time at the same length over the rival’s (each timed in turn with "
        f"{results.paper.label(REFERENCE_MIXER)}), geometric mean, {_percent(results)} interval "
        f"over lengths above 1 (t, bootstrap from {FEW} on); at least {claim['min_points']} lengths"
    )
    ours, ids = profile(results, claim["task"], claim["mixer"], where)
    where.pop("backend", None)  # of the others, what they run by themselves
    effects = []
    for rival in claim["than"]:
        theirs, their_ids = profile(results, claim["task"], rival, where)
        effects.append(_slowdown(results, claim, rival, ours, theirs, ids + their_ids))
    return effects, rule


def _slowdown(
    results: Results, claim: Claim, rival: str, ours: list[dict[str, Any]],
    theirs: list[dict[str, Any]], records: list[str],
) -> Effect:  # fmt: skip
    label = results.paper.label
    backend = claim["where"].get("backend")
    own = label(claim["mixer"]) + (f" ({backend})" if backend else "")
    name = f"time, {own} / {label(rival)}"
    for mixer, rows in ((own, ours), (label(rival), theirs)):
        if not rows:
            return Effect(name, NOT_RUN, why=f"no throughput rows of {mixer}")
    pairs = paired(relative_times(ours), relative_times(theirs))
    if not pairs:
        return Effect(name, INCONCLUSIVE, why="no length that both were timed at", records=records)
    logs = [math.log(a / b) for a, b in pairs.values()]
    ratio = mean_interval(logs, results.paper.rules["confidence"]).mapped(math.exp)
    borders = (1.0, math.inf)
    outcome = side(ratio, *borders)
    why = f"from {number(math.exp(min(logs)))} to {number(math.exp(max(logs)))} over lengths"
    if len(pairs) < claim["min_points"]:
        outcome, why = INCONCLUSIVE, f"{len(pairs)} lengths, too few"
    needed, device = claim.get("kernel_on", {}).get(rival), theirs[0].get("device")
    if needed not in (None, device):
        outcome = INCONCLUSIVE
        why += f"; {label(rival)} has the claim’s kernel on {needed} alone, not on {device}"
    if ours[0].get("causal") != theirs[0].get("causal"):
        why += "; one of them causal, the other not"
    return Effect(name, outcome, ratio, "", "above 1", why, records, borders)


# --------------------------------------------------------------------------------------- range


def in_range(results: Results, claim: Claim) -> tuple[list[Effect], str]:
    """Figures lie in ranges that were set beforehand."""
    rule = (
        f"{_percent(results)} t interval over at least {results.paper.rules['min_seeds']} seeds, "
        "or the record’s own bootstrap interval, inside the range"
    )
    found = results.main(claim["task"], claim["mixer"])
    return [_in_range(results, claim, found, c) for c in claim["conditions"]], rule


def _in_range(
    results: Results, claim: Claim, found: Group | None, condition: dict[str, Any]
) -> Effect:
    low = float(condition.get("at_least", -math.inf))
    high = float(condition.get("at_most", math.inf))
    name = _plain(condition["metric"])
    if "minus" in condition:
        name += f" − {_plain(condition['minus'])}"
    records = [r for r in found.finished if found] if found else []
    values = [v for r in records if (v := _value(r, claim["split"], condition)) is not None]
    if not values:
        return Effect(name, NOT_RUN, why="no finished record with this figure")
    ids = [r["run_id"] for r in records]
    rules = results.paper.rules
    why = ""
    if len(values) >= rules["min_seeds"]:
        interval = t_interval(values, rules["confidence"])
    else:
        interval = _own_interval(records, claim["split"], condition, values)
        seeds = f"{len(values)} seed{'s' if len(values) > 1 else ''}"
        why = f"{seeds}, too few"
        if interval.known:
            why = f"{seeds}: the interval is over documents, not over seeds"
    outcome = side(interval, low, high)
    return Effect(name, outcome, interval, "", _range_text(low, high), why, ids, (low, high))


def _value(record: Record, split: str, condition: dict[str, Any]) -> float | None:
    value = metric_of(record, split, condition["metric"])
    if value is None or "minus" not in condition:
        return value
    less = metric_of(record, split, condition["minus"])
    return None if less is None else value - less


def _own_interval(
    records: list[Record], split: str, condition: dict[str, Any], values: list[float]
) -> Interval:
    """The hull of the intervals that the records bring along."""
    estimate = sum(values) / len(values)
    nothing = Interval(estimate, None, None, len(values), "too few seeds")
    if "low" not in condition:
        return nothing
    ends = [
        (
            _value(r, split, condition | {"metric": condition["low"]}),
            _value(r, split, condition | {"metric": condition["high"]}),
        )
        for r in records
    ]
    known = [(low, high) for low, high in ends if low is not None and high is not None]
    if not known:
        return nothing
    return Interval(
        estimate, min(low for low, _ in known), max(high for _, high in known), len(values),
        "the record’s bootstrap",
    )  # fmt: skip


def _range_text(low: float, high: float) -> str:
    if low == -math.inf:
        return f"at most {high:g}"
    if high == math.inf:
        return f"at least {low:g}"
    return f"{low:g} to {high:g}"


# --------------------------------------------------------------------------------------- bound


def bounded(results: Results, claim: Claim) -> tuple[list[Effect], str]:
    """Inequalities that theory promises; one record that breaks one is enough."""
    found = results.main(claim["task"], claim["mixer"])
    records = found.finished if found else []
    rule = "holds in every record; one that breaks it contradicts"
    return [_bounded(claim, records, c) for c in claim["conditions"]], rule


def _bounded(claim: Claim, records: list[Record], condition: dict[str, Any]) -> Effect:
    split, metric = claim["split"], condition["metric"]
    name = _plain(metric)
    with_figure = [r for r in records if metric in r["metrics"].get(split, {})]
    if not with_figure:
        return Effect(name, NOT_RUN, why="no finished record with this figure")
    ids = [r["run_id"] for r in with_figure]
    limits = [_limits(r, split, condition) for r in with_figure]
    if any(low is None or high is None for low, high in limits):
        return Effect(name, NOT_RUN, why="the record lacks the bound", records=ids)
    untested = _untested(with_figure, split, condition)
    if untested:
        return Effect(name, INCONCLUSIVE, why=untested, records=ids)
    values = [metric_of(r, split, metric) for r in with_figure]
    finite = [v for v in values if v is not None]  # JSON has no NaN: it is written as null
    if len(finite) < len(values):
        return Effect(name, CONTRADICTED, why="not finite", records=ids)
    held = [low <= v <= high for v, (low, high) in zip(finite, limits, strict=True)]  # type: ignore[operator]
    estimate = max(finite) if "at_most" in condition else min(finite)
    interval = Interval(estimate, min(finite), max(finite), len(finite), "range over records")
    why = f"holds in {sum(held)} of {len(held)} records; brackets give their range"
    return Effect(
        name, REPRODUCED if all(held) else CONTRADICTED, interval, "",
        _bound_text(condition, limits), why, ids,
    )  # fmt: skip


def _untested(records: list[Record], split: str, condition: dict[str, Any]) -> str:
    """Why the inequality could not have failed, or nothing."""
    needs = condition.get("needs")
    if not needs:
        return ""
    for record in records:
        have = metric_of(record, split, needs["metric"])
        limit = metric_of(record, split, needs["more_than"])
        if have is None or limit is None or have <= limit:
            shown = f"{_plain(needs['metric'])} {number(have)}"
            return f"holds by itself with {shown} and {_plain(needs['more_than'])} {number(limit)}"
    return ""


def _limits(
    record: Record, split: str, condition: dict[str, Any]
) -> tuple[float | None, float | None]:
    """Lower and upper limit of a condition in one record; None where a named limit is not there."""
    ends: list[float | None] = []
    for key, default in (("at_least", -math.inf), ("at_most", math.inf)):
        limit = condition.get(key, default)
        value = metric_of(record, split, limit) if isinstance(limit, str) else float(limit)
        ends.append(None if value is None else value * float(condition.get("times", 1)))
    return ends[0], ends[1]


def _bound_text(condition: dict[str, Any], limits: list[tuple[Any, Any]]) -> str:
    factor = f"{condition['times']} × " if "times" in condition else ""
    for key, word, index in (("at_most", "at most", 1), ("at_least", "at least", 0)):
        if isinstance(condition.get(key), str):
            least = min(pair[index] for pair in limits)
            return f"{word} {factor}{_plain(condition[key])} = {number(least)}"
        if key in condition:
            return f"{word} {float(condition[key]):g}"
    return ""


def _plain(metric: str) -> str:
    return FIGURE_NAMES.get(metric, metric.replace("_", " "))


def _percent(results: Results) -> str:
    return f"{100 * results.paper.rules['confidence']:.0f} %"


KINDS: dict[str, Callable[[Results, Claim], tuple[list[Effect], str]]] = {
    "ranking": ranking, "growth": growing, "speed": speed, "range": in_range, "bound": bounded,
}  # fmt: skip


def markdown(verdicts: list[Verdict], caption: str) -> str:
    """The verdicts as a Markdown table, each with its parts below."""
    from gma_bench.report.table import escape_markdown as md

    out = [f"**Claims of the paper.** {md(caption)}", ""]
    out += ["| claim | verdict | effect |", "|:--|:--|:--|"]
    for v in verdicts:
        notes = " " + md(f"({'; '.join(v.notes)})") if v.notes else ""
        effects = "<br>".join(md(effect.shown) for effect in v.effects)
        out.append(f"| {md(v.id)}: {md(v.statement)} | **{v.outcome}**{notes} | {effects} |")
    return "\n".join(out) + "\n"
