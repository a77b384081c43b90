# SPDX-License-Identifier: Apache-2.0
"""`report.jsonl`: a line per tensor, as `inspect` writes it; a merge's `report` has part of it.

Fields that are not listed here are left alone: a later version may have more.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mergekit_ace.algebra.inspection import MatrixInspection, TensorInspection
from mergekit_ace.methods.inputs import TensorSettings
from mergekit_ace.methods.report_lines import finite, line_head, record_fields

Line = dict[str, Any]


class ReportError(ValueError):
    """Something in the config, the models or the folder is wrong; the message says what to do."""


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


def inspection_line(
    method: str, settings: TensorSettings, inspection: TensorInspection, seconds: float
) -> Line:
    """Return the line of one tensor: that of a merge's report, and what only a look can tell.

    Lists over experts are in the order of ``models``. Beside `MatrixRecord`'s fields there are
    those of `Comparison`, ``relative_size`` (‖Δ_t‖/‖W0‖, None where W0 is 0 or was not read), and
    for a matrix those of `Subspaces` and `MergedSpectrum` under ``subspaces`` and ``spectrum``. A
    stack of matrices has a list ``matrices``.

    Args:
        method: of the config.
        settings: of the tensor.
        inspection: of the tensor.
        seconds: that it took.
    """
    comparison = inspection.comparison
    base = comparison.base_norm
    line: Line = {
        **line_head(method, settings, inspection.shape, inspection.layout, seconds),
        "relative_size": [norm / base if base else None for norm in comparison.norm],
        **asdict(comparison),
    }
    matrices = [_matrix_fields(matrix) for matrix in inspection.matrices]
    if len(matrices) == 1:
        return finite({**line, **matrices[0]})
    return finite({**line, "matrices": matrices})


def _matrix_fields(matrix: MatrixInspection) -> Line:
    fields = record_fields(matrix.record)
    for name in ("subspaces", "spectrum"):
        part = getattr(matrix, name)
        if part is not None:
            fields[name] = asdict(part)
    return fields


def read_lines(path: Path) -> list[Line]:
    """Return the last line of each tensor in a report; numbers that JSON lacks as floats.

    Raises:
        ReportError: the file is missing, empty, or no report of one merge; the message names the
            line and the field.
    """
    try:
        texts = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f"{path} cannot be read: {error}") from error
    lines: dict[str | None, Line] = {}
    for number, text in enumerate(texts, start=1):
        if not text.strip():
            continue
        try:
            line = json.loads(text)
            wrong = wrong_field(line)
        except (ValueError, RecursionError) as error:
            cut = number == len(texts)  # each line ends in a line break
            wrong = "it was cut off" if cut else f"it is no JSON ({error})"
        if wrong:
            raise ReportError(
                f"line {number} of {path} is not the line of a report: {wrong}; remove it, or give "
                "the file that `report:` of a merge, or `mergekit-ace inspect`, wrote"
            )
        lines[line["tensor"]] = _with_infinities(line)
    if not lines:
        raise ReportError(
            f"{path} has no lines: no tensor was merged; give the report of a finished merge"
        )
    methods = sorted({line["method"] for line in lines.values() if "method" in line})
    if len(methods) > 1:
        raise ReportError(
            f"{path} holds lines of several merges, by {' and '.join(methods)}; keep those of one"
        )
    return list(lines.values())


def _with_infinities(line: Line) -> Line:
    """Return the line with numbers for what `finite` has written as text."""
    for matrix in matrices_of(line):
        for name, kind in OF_MATRICES.items():
            if kind is NUMBER_OR_INF and name in matrix:
                matrix[name] = float(matrix[name])  # type: ignore[index]
    return line


def matrices_of(line: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return what a line says of its matrices, one or more."""
    return line.get("matrices", [line])


def complete_lines(path: Path) -> int:
    """Cut off an unfinished last line, which a killed process left; return how many remain."""
    if not path.exists():
        return 0
    with open(path, "r+b") as file:
        content = file.read()
        end = content.rfind(b"\n") + 1
        if end != len(content):
            file.truncate(end)
            os.fsync(file.fileno())
    return content.count(b"\n")
