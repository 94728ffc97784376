"""The contract that every mixer answers to, whoever wrote it: ``gma-bench check mixer=NAME``.

What it asks is in :mod:`gma_bench.mixer.lines`; here mixers are held to it and findings are told.
"""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from gma_bench.errors import UserError
from gma_bench.mixer import Mixer
from gma_bench.mixer.lines import (
    D_MODEL,
    FORMS,
    LINES,
    MAX_LENGTH,
    NUM_HEADS,
    Case,
    Form,
    Line,
    NotApplicable,
    Noted,
    Subject,
    line,
)
from gma_bench.mixer.model import build_mixer, mixer_class, own_settings

if TYPE_CHECKING:
    from omegaconf import DictConfig
    from rich.console import RenderableType

__all__ = ["FORMS", "LINES", "Case", "CheckResult", "Subject", "check", "check_config", "line"]

Status = Literal["pass", "fail", "not applicable"]
NO_FORM = "the mixer does not have this form"


class Source(NamedTuple):
    """How to write a mixer's class and its own settings down in Python."""

    module: str
    name: str
    settings: dict[str, Any] = {}  # noqa: RUF012 (never written to)

    def __str__(self) -> str:
        own = "".join(f", {key}={value!r}" for key, value in self.settings.items())
        return f"lambda **sizes: {self.name}(**sizes{own})"


@dataclass(frozen=True)
class CheckResult:
    """What became of one line in one form.

    Attributes:
        detail: on a failure the smallest input that fails and how; else what there is to say.
        code: on a failure, Python that reproduces it.
    """

    line: str
    form: Form
    status: Status
    detail: str = ""
    code: str = ""


def check(
    build: Callable[..., Mixer],
    *,
    device: torch.device | str | None = None,
    compile_backend: str = "aot_eager",
    only: Collection[str] | None = None,
    source: Source | None = None,
) -> list[CheckResult]:
    """Hold a mixer to the contract.

    Args:
        build: makes the mixer from ``d_model``, ``num_heads``, ``causal`` and ``max_length``.
        device: where to run; ``None`` takes CUDA if there is any.
        compile_backend: backend of the torch.compile line; ``inductor`` generates code and takes
            longest.
        only: names of the lines to try; ``None`` tries all.
        source: how to write ``build`` down; by default, what it is called in its module.

    Returns:
        One result a line and form.
    """
    chosen = device or ("cuda" if torch.cuda.is_available() else "cpu")
    source = source or Source(build.__module__, getattr(build, "__qualname__", "build"))
    lines = [entry for entry in LINES if only is None or entry.name in only]
    results: list[CheckResult] = []
    with torch.random.fork_rng(devices=[]):
        for form in FORMS:
            subject = Subject(build, form, chosen, compile_backend)
            results += _check_form(subject, lines, source)
    if all(r.status == "not applicable" for r in results):
        results.append(CheckResult("has a form", "bidirectional", "fail", "refuses both"))
    return results


def _check_form(subject: Subject, lines: Sequence[Line], source: Source) -> Iterator[CheckResult]:
    form = subject.form
    try:
        mixer = subject.new()
    except UserError as error:  # a form that the mixer says it does not have
        yield CheckResult("builds", form, "not applicable", str(error))
        yield from (CheckResult(e.name, form, "not applicable", NO_FORM) for e in lines)
        return
    except Exception as error:
        code = _code(source, form, "print(subject.new())")
        yield CheckResult("builds", form, "fail", _said(error), code)
        return
    yield CheckResult("builds", form, "pass", mixer.extra_repr())
    for entry in lines:
        if reason := entry.why_not(mixer):
            yield CheckResult(entry.name, form, "not applicable", reason)
        else:
            yield _check_line(entry, subject, source)


def _check_line(entry: Line, subject: Subject, source: Source) -> CheckResult:
    form = subject.form
    for case in entry.cases:
        try:
            problem = entry.check(subject, case)
        except NotApplicable as reason:
            return CheckResult(entry.name, form, "not applicable", str(reason))
        except Noted as note:
            return CheckResult(entry.name, form, "pass", str(note))
        except Exception as error:  # whatever a mixer raises is a finding about it
            problem = _said(error)
        if problem:
            code = _code(source, form, f'print(line("{entry.name}").check(subject, {case!r}))')
            return CheckResult(entry.name, form, "fail", f"{case}: {problem}", code)
    return CheckResult(entry.name, form, "pass")


def _code(source: Source, form: Form, last: str) -> str:
    return "\n".join((
        f"from {source.module} import {source.name}",
        "from gma_bench.mixer.contract import Case, Subject, line",
        f'subject = Subject({source}, "{form}")',
        last,
    ))  # fmt: skip


def _said(error: BaseException) -> str:
    from hydra.errors import InstantiationException

    if isinstance(error, InstantiationException) and error.__cause__:
        error = error.__cause__
    text = " ".join(" ".join(str(error).splitlines()[:2]).split())
    return f"{type(error).__name__}: {text or 'no message'}"


def check_config(config: DictConfig, *, as_json: bool = False) -> bool:
    """Check ``config.mixer`` and print what was found; whether every line passed.

    A mixer that differs from layer to layer is checked once in every shape it takes.

    Args:
        as_json: print a list of results (the fields of :class:`CheckResult`, and ``mixer``) in place
            of a table.
    """
    from rich.console import Console

    with redirect_stdout(sys.stderr):  # layers of some packages print
        found = list(check_layers(config))
    if as_json:
        rows = [{"mixer": name} | asdict(r) for name, results in found for r in results]
        print(json.dumps(rows, indent=1))
    else:
        for name, results in found:
            Console().print(table(results, name))
            for script in scripts_of(results):  # not wrapped, so that it can be copied
                print(f"\n{script}")
    return all(r.status != "fail" for _, results in found for r in results)


def check_layers(config: DictConfig) -> Iterator[tuple[str, list[CheckResult]]]:
    """Name and results of ``config.mixer``, once in every shape that it takes in a model's layers."""
    target = mixer_class(config.mixer["_target_"])
    accepted = inspect.signature(target).parameters
    differs = "layer_index" in accepted
    seen: set[str] = set()
    for layer in range(config.model.num_layers if differs else 1):

        def build(layer: int = layer, **sizes: Any) -> Mixer:
            return build_mixer(config.mixer, layer_index=layer, **sizes)

        shape = _shape_of(build)
        if shape in seen:
            continue
        seen.add(shape)
        settings = own_settings(config.mixer, accepted) | (
            {"layer_index": layer} if differs else {}
        )
        source = Source(target.__module__, target.__name__, settings)
        name = config.mixer.name + (f", layer {layer}" if differs else "")
        yield name, check(build, source=source)


def _shape_of(build: Callable[..., Mixer]) -> str:
    """What a mixer is like in the first of its forms.

    Raises:
        UserError: it refuses both, so that a setting is wrong.
    """
    refused: list[UserError] = []
    for causal in (False, True):
        try:
            return repr(
                build(d_model=D_MODEL, num_heads=NUM_HEADS, causal=causal, max_length=MAX_LENGTH)
            )
        except UserError as error:
            refused.append(error)
        except Exception:  # the check itself reports it
            continue
    if len(refused) == 2:
        raise refused[0]
    return ""


def table(results: Sequence[CheckResult], title: str) -> RenderableType:
    """Results for a terminal: a row a line, a column a form, and below what there is to say."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    styles = {"pass": "green", "fail": "bold red", "not applicable": "dim"}
    found = {(r.line, r.form): r for r in results}
    out = Table("line", *FORMS, title=f"Contract: {title}", title_justify="left")
    for name in dict.fromkeys(r.line for r in results):
        row = [found.get((name, form)) for form in FORMS]
        out.add_row(name, *(Text(r.status, style=styles[r.status]) if r else "" for r in row))
    said: dict[tuple[Status, Form, str], list[str]] = {}
    for r in sorted(results, key=lambda r: r.status):
        if r.detail and r.detail != NO_FORM:
            said.setdefault((r.status, r.form, r.detail), []).append(r.line)
    notes = []
    for (status, form, detail), lines in said.items():
        which = lines[0] if len(lines) == 1 else f"{len(lines)} lines"
        notes.append(Text(f"{status}  {form}, {which}: {detail}", style=styles[status]))
    return Group(out, *notes)


def scripts_of(results: Sequence[CheckResult]) -> list[str]:
    """Python that reproduces the failures: a script a form, which builds the mixer once."""
    scripts: dict[str, list[str]] = {}
    for r in results:
        if r.code:
            *start, last = r.code.splitlines()
            scripts.setdefault("\n".join(start), []).append(last)
    return ["\n".join((start, *lasts)) for start, lasts in scripts.items()]
