# SPDX-License-Identifier: Apache-2.0
"""`report: PATH`: one JSON line per merged tensor."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from mergekit_ace.algebra.records import MatrixRecord, TensorRecord
from mergekit_ace.files.saving import package_versions
from mergekit_ace.methods.parameters import TensorSettings

# Whose versions are in a report.
REPORTED_PACKAGES = ("mergekit", "mergekit-ace", "torch")
_LOCK = threading.Lock()  # --multi-gpu merges tensors side by side


def append_report(
    method: str, settings: TensorSettings, record: TensorRecord, seconds: float
) -> None:
    """Append the JSON line of one tensor to the file under `report:`, which is created, or grows.

    A matrix's fields (see `MatrixRecord`) stand at the top level of the line; a stacked tensor has
    a list of them under ``matrices`` instead. Lists over experts are in the order of ``models``. A
    number that JSON lacks (γ = ∞) is written as text.

    Args:
        method: the merge method.
        settings: of the tensor.
        record: what was done.
        seconds: wall time of the merge of this tensor.
    """
    line = line_head(method, settings, record.shape, record.layout, seconds)
    if len(record.matrices) == 1:
        line |= record_fields(record.matrices[0])
    else:
        line["matrices"] = [record_fields(matrix) for matrix in record.matrices]
    text = json.dumps(finite(line), allow_nan=False) + "\n"
    with _LOCK, open(settings.parameters["report"], "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a kill cut off the last line; it takes no other with it
                text = "\n" + text
        file.write(text.encode())


def line_head(
    method: str, settings: TensorSettings, shape: Sequence[int], layout: str, seconds: float
) -> dict[str, Any]:
    """Return what the line of a tensor begins with, in the report of a merge or of `inspect`."""
    line: dict[str, Any] = {
        "tensor": settings.name,
        "method": method,
        "shape": list(shape),
        "layout": layout,
        "models": settings.models,
        "seconds": round(seconds, 6),
        "versions": package_versions(*REPORTED_PACKAGES),
    }
    if settings.coefficients is not None:
        line["coefficients"] = list(settings.coefficients)
    return line


def record_fields(matrix: MatrixRecord) -> dict[str, Any]:
    """Return what a line says of one matrix."""
    return {key: value for key, value in asdict(matrix).items() if value is not None}


def finite(value: Any) -> Any:
    """Return a JSON value with numbers that JSON lacks (γ = ∞) as text."""
    if isinstance(value, dict):
        return {key: finite(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [finite(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
