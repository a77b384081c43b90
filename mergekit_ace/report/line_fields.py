# SPDX-License-Identifier: Apache-2.0
"""The fields of a report's lines: which there must be, and what they hold.

Fields that are not listed here are left alone: a later version may have more.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class FieldKind:
    """What a field holds.

    Attributes:
        words: the kind, in words; `{n}` stands for the number of experts.
        fits: tells whether a value is of it, given that number.
    """

    words: str
    fits: Callable[[Any, int], bool]


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _may_be_infinite(value: Any) -> bool:
    return _is_number(value) or value in ("inf", "-inf", math.inf, -math.inf)


def _nullable(kind: FieldKind) -> FieldKind:
    return FieldKind(
        f"{kind.words}, or null", lambda value, n: value is None or kind.fits(value, n)
    )


def _list_of(kind: FieldKind) -> FieldKind:
    return FieldKind(
        f"a list, of which each is {kind.words}",
        lambda value, n: isinstance(value, list) and all(kind.fits(one, n) for one in value),
    )


def _per_expert(kind: FieldKind) -> FieldKind:
    fits = _list_of(kind).fits
    return FieldKind(
        f"{kind.words} for each of {{n}} experts",
        lambda value, n: fits(value, n) and len(value) == n,
    )


TEXT = FieldKind("text", lambda value, n: isinstance(value, str))
NAME = _nullable(TEXT)
FLAG = FieldKind("true or false", lambda value, n: isinstance(value, bool))
COUNT = FieldKind("a whole number", lambda value, n: _is_count(value))
NUMBER = FieldKind("a number", lambda value, n: _is_number(value))
NUMBER_OR_NONE = _nullable(NUMBER)
NUMBER_OR_INF = FieldKind("a number", lambda value, n: _may_be_infinite(value))
NUMBERS = _list_of(NUMBER)
NUMBERS_OR_NONE = _nullable(NUMBERS)
SHAPE = _list_of(COUNT)
NAMES = _list_of(TEXT)
PER_EXPERT = _per_expert(NUMBER)
PER_EXPERT_OR_NONE = _per_expert(NUMBER_OR_NONE)
PAIRS = _per_expert(PER_EXPERT_OR_NONE)
HISTOGRAM = _per_expert(SHAPE)
ANGLES = _per_expert(NUMBERS_OR_NONE)
COEFFICIENTS = FieldKind(
    "at least {n} numbers", lambda value, n: NUMBERS.fits(value, n) and len(value) >= n
)
STATISTIC = FieldKind("gamma or log_variance", lambda value, n: value in ("gamma", "log_variance"))
OBJECT = FieldKind("an object", lambda value, n: isinstance(value, dict))
OBJECTS = _list_of(OBJECT)

# Of a tensor, and of each of its matrices; a line has both where there is one matrix.
OF_TENSORS = {
    "tensor": NAME, "models": NAMES, "skipped": TEXT, "method": TEXT, "decisions_of": TEXT,
    "shape": SHAPE, "layout": TEXT, "seconds": NUMBER, "versions": OBJECT, "matrices": OBJECTS,
    "coefficients": COEFFICIENTS, "relative_size": PER_EXPERT_OR_NONE, "base_norm": NUMBER_OR_NONE,
    "norm": PER_EXPERT, "unchanged": PER_EXPERT, "cosine": PAIRS, "unit": NUMBER,
    "histogram": HISTOGRAM,
}  # fmt: skip
OF_MATRICES = {
    "rule": TEXT, "weight": PER_EXPERT, "tau": PER_EXPERT, "changed": PER_EXPERT,
    "noise": PER_EXPERT, "gamma": NUMBER_OR_INF, "log_variance": NUMBER_OR_INF,
    "statistic": STATISTIC, "threshold": NUMBER_OR_INF, "heterogeneous": FLAG, "normalized": FLAG,
    "prior": FLAG, "refined": FLAG, "epsilon": PER_EXPERT_OR_NONE, "share": PER_EXPERT_OR_NONE,
    "ridge": NUMBER_OR_INF, "raised": FLAG, "amplification": NUMBER_OR_INF, "rank": COUNT,
    "sigma_iso": NUMBER, "form": TEXT, "condition": NUMBER_OR_INF, "precision": TEXT,
    "mix": NUMBER, "subspaces": OBJECT, "spectrum": OBJECT, "agreement": OBJECT,
}  # fmt: skip
OF_PARTS = {
    "subspaces": {
        "size": COUNT, "stable_rank": PER_EXPERT_OR_NONE, "inputs": PAIRS, "outputs": PAIRS,
    },
    "spectrum": {
        "before": NUMBERS, "after": NUMBERS, "share_before": NUMBER, "share_after": NUMBER,
        "alignment": NUMBERS_OR_NONE,
    },
    "agreement": {"cosine": PAIRS, "size": COUNT, "angles": ANGLES},
}  # fmt: skip

# Fields that come together: where one of the first is, all of the second are.
INSPECTED = ("relative_size", "base_norm", "norm", "unchanged", "cosine", "unit", "histogram")
DECIDED = (
    "gamma", "log_variance", "threshold", "heterogeneous", "normalized", "refined", "epsilon",
    "condition",
)  # fmt: skip
TOGETHER = (
    (INSPECTED, INSPECTED),
    (("statistic", "heterogeneous", "refined"), ("statistic", *DECIDED)),
    (("refined",), ("rank",)),
    (("ridge", "amplification"), ("ridge", "amplification")),
)


def wrong_field(line: Any) -> str:
    """Return what is wrong with a line of a report, naming the field; empty if nothing is."""
    if not isinstance(line, dict):
        return f"it holds {_shown(line)} instead of an object"
    return next(_wrong_fields(line), "")


def _wrong_fields(line: Mapping[str, Any]) -> Iterator[str]:
    yield from _missing(line, ("tensor", "models"))
    models = line.get("models")
    count = len(models) if isinstance(models, list) else 0
    yield from _misfits(line, OF_TENSORS, count)
    if "skipped" in line:
        return
    yield from _missing(line, ("shape", "layout"))
    for number, matrix in enumerate(line.get("matrices", [line])):
        where = f"matrices.{number}." if "matrices" in line else ""
        yield from _missing(matrix, ("rule", "weight", "tau"), where)
        yield from _misfits(matrix, OF_MATRICES, count, where)
        for part, kinds in OF_PARTS.items():
            if part in matrix:
                inner = f"{where}{part}."
                yield from _missing(matrix[part], kinds, inner)
                yield from _misfits(matrix[part], kinds, count, inner)
    for some, all_ in TOGETHER:
        for matrix in (line, *line.get("matrices", ())):
            if any(name in matrix for name in some):
                yield from _missing(matrix, all_)


def _missing(content: Mapping[str, Any], names: Iterable[str], where: str = "") -> Iterator[str]:
    for name in names:
        if name not in content:
            yield f"it lacks the field {where}{name}"


def _misfits(
    content: Mapping[str, Any], kinds: Mapping[str, FieldKind], count: int, where: str = ""
) -> Iterator[str]:
    for name, kind in kinds.items():
        if name in content and not kind.fits(content[name], count):
            words = kind.words.format(n=count)
            yield f"its field {where}{name} holds {_shown(content[name])} instead of {words}"


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
