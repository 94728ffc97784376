"""Any layer ``(B, N, d) -> (B, N, d)`` as a mixer: ``layer=torch.nn.MultiheadAttention``.

How a layer is built and called is found by the names of its arguments; what these do not tell is
given: ``layer=mine.yaml``, or ``+mixer.mask=…`` beside ``layer=…``.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from gma_bench.errors import SettingError
from gma_bench.mixer import Mixer, zero_masked

Truth = Literal["real", "padding"]

SIZES: dict[str, frozenset[str]] = {
    "d_model": frozenset(["d_model", "embed_dim", "dim", "hidden_size", "input_size", "n_embd"]),
    "num_heads": frozenset(
        ["num_heads", "heads", "nhead", "n_heads", "n_head", "num_attention_heads"]
    ),
    "head_dim": frozenset(["head_dim", "dim_head"]),
    "max_length": frozenset(["max_length", "max_len", "max_seq_len", "seq_len"]),
    "causal": frozenset(["causal", "is_causal"]),
}
"""What a constructor's arguments are called that take one of the backbone's sizes."""
SEQUENCES = ("key", "value", "keys", "values", "k", "v")
"""Arguments beside the first that take the sequence where they have no default."""
PADDING_MASKS: dict[str, Truth] = {
    "key_padding_mask": "padding",
    "src_key_padding_mask": "padding",
    "padding_mask": "padding",
    "attention_mask": "real",
    "mask": "real",
}
"""Arguments that take a ``(B, N)`` mask, and what True says in it."""
CAUSAL_MASKS = ("attn_mask", "src_mask")
"""Arguments that take an ``(N, N)`` mask; True says the same as in the layer's padding mask."""
CAUSAL_FLAGS = ("is_causal", "causal")
SPARED = {"need_weights": False, "output_attentions": False, "use_cache": False}
"""Arguments of a call that ask for what is not used here, such as the N×N weights."""
PROBE_LENGTH = 8


@dataclass(frozen=True)
class Call:
    """How a layer is called.

    Attributes:
        sequences: arguments that take ``x`` beside the first.
        mask: the argument that takes the padding mask; None where the layer has none.
        mask_true: what True says in its masks.
        causal_mask: the argument that takes an ``(N, N)`` mask.
        causal_flag: the argument that makes a call causal.
        batch_first: ``(B, N, d)``, or else ``(N, B, d)``.
        output: which of several outputs: a position, a key or an attribute.
        others: further arguments.
    """

    sequences: tuple[str, ...] = ()
    mask: str | None = None
    mask_true: Truth = "real"
    causal_mask: str | None = None
    causal_flag: str | None = None
    batch_first: bool = True
    output: int | str = 0
    others: Mapping[str, Any] | None = None

    def __call__(self, layer: nn.Module, x: Tensor, mask: Tensor | None, causal: bool) -> Tensor:
        """``(B, N, d)`` through the layer; what comes out has been looked at for its shape."""
        named: dict[str, Any] = dict(self.others or {})
        if mask is not None:
            if self.mask is None:
                x = zero_masked(x, mask)
            else:
                named[self.mask] = mask if self.mask_true == "real" else ~mask
        if causal and self.causal_mask:
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
            named[self.causal_mask] = seen if self.mask_true == "real" else ~seen
        if self.causal_flag:
            named[self.causal_flag] = causal
        given = x if self.batch_first else x.transpose(0, 1)
        out = self._chosen(layer(given, **dict.fromkeys(self.sequences, given), **named))
        out = out if self.batch_first else out.transpose(0, 1)
        if out.shape != x.shape:
            raise ValueError(
                f"{type(layer).__name__} gave {tuple(out.shape)} for x {tuple(x.shape)}; "
                "+mixer.output=… picks another of several outputs"
            )
        return out

    def _chosen(self, out: Any) -> Tensor:
        if isinstance(out, Tensor):
            return out
        if isinstance(self.output, str):
            chosen = out[self.output] if isinstance(out, Mapping) else getattr(out, self.output)
        else:
            chosen = (tuple(out.values()) if isinstance(out, Mapping) else out)[self.output]
        if not isinstance(chosen, Tensor):
            raise ValueError(
                f"output {self.output!r} is a {type(chosen).__name__}, no tensor; "
                "+mixer.output=… picks another"
            )
        return chosen


class LayerMixer(Mixer):
    """A layer of any package, called as its arguments' names say.

    Padding masks are handed to the layer in its own terms; a layer that takes none gets zeros where
    there is padding. Outputs at padding are zeroed. Whether a layer without a causal switch is causal
    is found by trying: whether a last token moves an earlier output.

    Args:
        d_model, num_heads, causal, max_length: as for every :class:`Mixer`.
        layer: dotted name of a subclass of ``torch.nn.Module``.
        part: the submodule of it that is the layer (``blocks.0.attention``), for layers that only the
            model around them builds and initialises.
        arguments: of its constructor, beside those found by name. ``d_model``, ``num_heads``,
            ``head_dim``, ``max_length`` and ``causal`` as values stand for the sizes at hand; a
            mapping with ``_target_`` stands for an object of that class.
        call: of its ``forward``, beside those found by name.
        sequences, mask, mask_true, causal_mask, batch_first, output: as in :class:`Call`, where names
            tell nothing or the wrong thing.
        forms: the forms that the layer has, ``[causal]`` for example; None tries.

    Raises:
        SettingError: no such layer, arguments that are missing, a form that it does not have.
    """

    streaming: ClassVar[bool] = False

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        causal: bool = False,
        max_length: int | None = None,
        *,
        layer: str,
        part: str | None = None,
        arguments: Mapping[str, Any] | None = None,
        call: Mapping[str, Any] | None = None,
        sequences: Sequence[str] | None = None,
        mask: str | None = None,
        mask_true: Truth | None = None,
        causal_mask: str | None = None,
        batch_first: bool | None = None,
        output: int | str = 0,
        forms: Sequence[str] | None = None,
    ) -> None:
        super().__init__(d_model, num_heads, causal, max_length)
        kind = layer_class(layer)
        sizes = {
            "d_model": d_model, "num_heads": num_heads, "head_dim": self.head_dim,
            "max_length": max_length, "causal": causal,
        }  # fmt: skip
        self.arguments = arguments or {}
        given = constructor_arguments(kind, layer, sizes, self.arguments)
        self.built_with = {
            name: value for name, value in given.items() if name not in self.arguments
        }
        self.layer = kind(**given)
        if part is not None:
            self.layer = _submodule(self.layer, layer, part)
        takes = named_parameters(type(self.layer), "forward")
        found = mask or _first(PADDING_MASKS, takes)
        switched = not SIZES["causal"].isdisjoint(given)
        later = None if switched else causal_mask or _first(CAUSAL_MASKS, takes)
        rest = call or {}
        self.how = Call(
            sequences=_sequences(takes, layer, {*rest, found})
            if sequences is None
            else tuple(sequences),
            mask=found,
            mask_true=mask_true or PADDING_MASKS.get(found or "", "real"),
            causal_mask=later,
            causal_flag=None if switched or later else _first(CAUSAL_FLAGS, takes),
            batch_first=given.get("batch_first", True) if batch_first is None else batch_first,
            output=output,
            others={k: v for k, v in SPARED.items() if k in takes} | dict(rest),
        )
        self.longest = None if SIZES["max_length"].isdisjoint(given) else max_length
        if forms is None and not (switched or later or self.how.causal_flag):
            forms = ["bidirectional"] if self._looks_ahead() else ["causal"]
        if forms is not None:
            self._require_form(forms, layer)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        if self.longest is not None and x.shape[1] > self.longest:
            raise SettingError(
                "max_length", self.longest, f"the layer was built for no more, and got {x.shape[1]}",
                f"task.max_length={x.shape[1]}",
            )  # fmt: skip
        return zero_masked(self.how(self.layer, x, mask, self.causal), mask)

    def extra_repr(self) -> str:
        how = self.how
        given = self.built_with | dict(self.arguments)
        built = ", ".join(f"{name}={value}" for name, value in given.items())
        named = [f"{name}=x" for name in how.sequences]
        if how.mask:
            named.append(f"{how.mask}={'mask' if how.mask_true == 'real' else '~mask'}")
        if how.causal_mask and self.causal:
            named.append(f"{how.causal_mask}={'seen' if how.mask_true == 'real' else '~seen'}")
        if how.causal_flag:
            named.append(f"{how.causal_flag}={self.causal}")
        named += [f"{name}={value!r}" for name, value in (how.others or {}).items()]
        return f"built with {built}; called with {', '.join(['x', *named])}"

    def _looks_ahead(self) -> bool:
        """Whether a last token moves an earlier output; the form asked for where none can be told."""
        length = min(PROBE_LENGTH, self.max_length or PROBE_LENGTH)
        tensors = [*self.layer.parameters(), *self.layer.buffers()]
        like = next((t for t in tensors if t.is_floating_point()), torch.empty(0))
        if length < 2 or like.is_meta or isinstance(like, FakeTensor):
            return not self.causal
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            x = torch.randn(1, length, self.d_model).to(like)
            other = torch.cat((x[:, :-1], -3 * x[:, -1:]), 1)
            before, after = (  # whatever a call leaves in a layer is left in a copy
                self.how(copy.deepcopy(self.layer).eval(), t, None, False)[:, :-1]
                for t in (x, other)
            )
        if not (before.isfinite().all() and after.isfinite().all()):
            return not self.causal
        return not torch.allclose(before, after, 1e-4, 1e-6)

    def _require_form(self, forms: Iterable[str], layer: str) -> None:
        form, forms = ("causal" if self.causal else "bidirectional"), tuple(forms)
        if form not in forms:
            raise SettingError("layer", layer, f"has no {form} form, only {', '.join(forms)}",
                               f"+mixer.forms=[{','.join(forms)}]")  # fmt: skip


def layer_class(path: str) -> type[nn.Module]:
    """The layer that a dotted path names.

    Raises:
        SettingError: it cannot be imported, is no module, or is a mixer already.
    """
    module, _, name = path.rpartition(".")
    example = "layer=torch.nn.MultiheadAttention"
    try:
        kind = getattr(importlib.import_module(module), name)
    except Exception as error:  # whatever the package raises
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise SettingError(
            "layer", path, f"must be an importable class ({said})", example
        ) from error
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        raise SettingError("layer", path, "must be a subclass of torch.nn.Module", example)
    if issubclass(kind, Mixer):
        raise SettingError("layer", path, "is a mixer already", f"mixer._target_={path}")
    return kind


def named_parameters(kind: type, method: str) -> dict[str, inspect.Parameter]:
    """Arguments of a method by name, those that ``*args`` or ``**kwargs`` hand to a base class too."""
    found: dict[str, inspect.Parameter] = {}
    defined = [base for base in kind.__mro__ if method in vars(base) and base is not nn.Module]
    for base in defined:
        parameters = list(inspect.signature(vars(base)[method]).parameters.values())[1:]
        for p in parameters:
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD):
                # what a base class needs may be given by the class itself
                found.setdefault(p.name, p if base is defined[0] else p.replace(default=None))
        if not any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
            break
    return found


def constructor_arguments(
    kind: type[nn.Module], layer: str, sizes: Mapping[str, Any], own: Mapping[str, Any]
) -> dict[str, Any]:
    """What a layer is built with: the sizes that it takes by their names, and what is given.

    Raises:
        SettingError: an argument without default is neither.
    """
    takes = named_parameters(kind, "__init__")
    found = {
        name: sizes[size]
        for name in takes
        for size, names in SIZES.items()
        if name in names and sizes[size] is not None
    }
    if "batch_first" in takes:
        found["batch_first"] = True
    found |= {str(name): _resolved(value, sizes) for name, value in own.items()}
    missing = [p.name for p in takes.values() if p.default is p.empty and p.name not in found]
    if missing:
        raise SettingError(
            "layer", layer, f"is also built with {', '.join(missing)}",
            f"+mixer.arguments.{missing[0]}=…",
        )  # fmt: skip
    return found


def _resolved(value: Any, sizes: Mapping[str, Any]) -> Any:
    if isinstance(value, str):
        return sizes.get(value, value)
    if isinstance(value, Mapping):
        from hydra.utils import instantiate

        inner = {name: _resolved(v, sizes) for name, v in value.items()}
        return instantiate(inner) if "_target_" in inner else inner
    if isinstance(value, Sequence):
        return [_resolved(v, sizes) for v in value]
    return value


def _submodule(model: nn.Module, layer: str, part: str) -> nn.Module:
    try:
        return model.get_submodule(part)
    except AttributeError:
        names = ", ".join(name for name, _ in model.named_modules() if name)
        raise SettingError(
            "mixer.part", part, f"{layer} has {names or 'no parts'}", "~mixer.part"
        ) from None


def _sequences(
    takes: Mapping[str, inspect.Parameter], layer: str, given: set[str | None]
) -> tuple[str, ...]:
    """Arguments of a call beside the first that take the sequence: those of a known name, if needed."""
    needed = [p.name for p in list(takes.values())[1:] if p.default is p.empty]
    unknown = [name for name in needed if name not in SEQUENCES and name not in given]
    if unknown:
        raise SettingError(
            "layer",
            layer,
            f"is also called with {', '.join(unknown)}",
            f"+mixer.call.{unknown[0]}=…",
        )
    return tuple(name for name in needed if name in SEQUENCES)


def _first(names: Iterable[str], among: Mapping[str, Any]) -> str | None:
    return next((name for name in names if name in among), None)
