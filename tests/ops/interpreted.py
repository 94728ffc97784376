"""Kernels under Triton's interpreter, beside the float64 reference; prints JSON lines.

Run as a script with TRITON_INTERPRET=1: ``interpreted.py GROUP``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent.parent))

from tests.ops.cases import Case, errors, evaluate, make

SMALL = {"batch": 1, "components": 16, "width": 16, "value_width": 16}
GROUPS: dict[str, dict[str, dict[str, object]]] = {
    "default": {
        "cross-attention, masked": {
            "batch": 2, "n": 20, "m": 70, "components": 10, "width": 20, "value_width": 24,
            "masked": True,
        },
        "causal": SMALL | {"n": 75, "causal": True, "by_token": True},
        "causal, masked": SMALL | {"batch": 2, "n": 40, "causal": True, "masked": True},
        "one key, by column": SMALL | {"n": 3, "m": 1, "by_column": True},
        "one real key, causal": SMALL | {
            "batch": 2, "n": 40, "causal": True, "masked": True, "lone": True,
        },
        "far, causal": SMALL | {"n": 40, "causal": True, "offset": 30.0},
        "far": SMALL | {"n": 20, "m": 40, "offset": 30.0},
        "bfloat16": SMALL | {"n": 40, "dtype": torch.bfloat16},
        "bfloat16, causal": SMALL | {"n": 40, "causal": True, "dtype": torch.bfloat16},
    },
    "components": {
        f"K={k}, {'causal' if causal else 'bidirectional'}": SMALL | {
            "n": 150, "components": k, "causal": causal, "heads": 1,
        }
        for k in (64, 65, 128, 300, 512) for causal in (False, True)
    },
    "widths": {
        f"d_r={r}, d_v={v}, {'causal' if causal else 'bidirectional'}": SMALL | {
            "n": 70, "width": r, "value_width": v, "causal": causal,
        }
        for r, v in ((16, 128), (128, 16), (48, 80), (128, 128)) for causal in (False, True)
    },
    "lengths": {
        f"N={n}, {'causal' if causal else 'bidirectional'}": SMALL | {
            "n": n, "causal": causal, "masked": n > 1,
        }
        for n in (1, 15, 64, 65, 400) for causal in (False, True)
    },
}  # fmt: skip


def build(
    offset: float = 0.0,
    dtype: torch.dtype = torch.float32,
    by_column: bool = False,
    **shape: object,
) -> Case:
    """A case, far from the origin by an offset, in numbers that its dtype holds.

    ``by_column`` lays out q, k and v with their last dimension apart in memory.
    """
    case = make(**shape)  # type: ignore[arg-type]
    q, k, v, means, *rest = case.tensors
    tensors = q + offset, k + offset, v, means + offset, *rest
    rounded = [t.to(dtype if i < 3 else torch.float32).double() for i, t in enumerate(tensors)]
    if by_column:
        rounded[:3] = [t.mT.contiguous().mT for t in rounded[:3]]
    return case._replace(tensors=tuple(rounded))


def main() -> None:
    """Evaluate the cases of a group, twice."""
    for name, settings in GROUPS[sys.argv[1]].items():
        dtype = settings.get("dtype", torch.float32)
        assert isinstance(dtype, torch.dtype)
        case = build(**settings)  # type: ignore[arg-type]
        want = evaluate(case, "reference", torch.float64, upstream_dtype=dtype)
        got = evaluate(case, "triton", torch.float32, token_dtype=dtype)
        again = evaluate(case, "triton", torch.float32, token_dtype=dtype)
        print(json.dumps({
            "case": name, "errors": errors(got, want),
            "tolerance": 1e-5 if dtype == torch.float32 else 1e-2,
            "zero where nothing is read": not bool(got[0][want[0] == 0].any()),
            "repeats": all(torch.equal(a, b) for a, b in zip(got, again, strict=True)),
        }), flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
