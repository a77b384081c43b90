# SPDX-License-Identifier: Apache-2.0
"""The lines of a report: one `Record` in JSON per tensor, of a merge or of `inspect`."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_serializer, model_validator
from pydantic import SerializerFunctionWrapHandler as Handler

from mergekit_ace.algebra.task_vectors import MatrixRecord, PairTable, TensorRecord
from mergekit_ace.files.saving import package_versions

if TYPE_CHECKING:
    from mergekit_ace.methods.base import TensorSettings

# Whose versions are in a report.
REPORTED_PACKAGES = ("mergekit", "mergekit-ace", "torch")
_LOCK = threading.Lock()  # --multi-gpu merges tensors side by side


class Record(BaseModel):
    """What is known of one tensor of a merge. Lists over experts are in the order of `models`.

    In a file, the fields of a single matrix stand beside those of the tensor; a stacked tensor has
    a list of them under ``matrices``. A number that JSON lacks (γ = ∞) is text there.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="strings")

    tensor: str | None  # None for one in memory without a name
    method: str
    shape: tuple[int, ...]
    layout: str
    models: tuple[str, ...]
    seconds: float = 0.0
    versions: dict[str, str] = Field(default_factory=dict)
    coefficients: tuple[float, ...] | None = None  # of the components, and of the refinement
    decisions_of: str | None = None  # the method that decides in the place of the merge's own
    base_norm: float | None = None  # ‖W0‖_F; None in a merge, as what follows
    norm: tuple[float, ...] | None = None  # ‖Δ_t‖_F
    relative_size: tuple[float | None, ...] | None = None  # ‖Δ_t‖/‖W0‖; None where W0 is zero
    unchanged: tuple[float, ...] | None = None  # share of entries with W_t = W0
    cosine: PairTable | None = None  # ⟨Δ_s, Δ_t⟩ / (‖Δ_s‖ ‖Δ_t‖); None where one of them is zero
    matrices: tuple[MatrixRecord, ...] = ()  # one per stacked matrix

    @property
    def name(self) -> str:
        """The name of the tensor as text."""
        return str(self.tensor)

    @model_validator(mode="before")
    @classmethod
    def _nest(cls, content: Any) -> Any:
        if isinstance(content, dict) and "matrices" not in content:
            return {**content, "matrices": [content]}
        return content

    @model_serializer(mode="wrap")
    def _flatten(self, handler: Handler) -> dict[str, Any]:
        content = handler(self)
        if len(self.matrices) == 1:
            content |= content.pop("matrices")[0]
        return content


def tensor_record(
    method: str, settings: TensorSettings, record: TensorRecord, seconds: float, **measured: Any
) -> Record:
    """Return the record of one tensor, of what a method did, or `inspect` found, in so long."""
    learned = settings.coefficients
    return Record(
        tensor=settings.name,
        method=method,
        shape=record.shape,
        layout=record.layout,
        models=tuple(settings.models),
        seconds=round(seconds, 6),
        versions=package_versions(*REPORTED_PACKAGES),
        coefficients=tuple(learned) if learned else None,
        matrices=record.matrices,
        **measured,
    )


def append_report(
    method: str, settings: TensorSettings, record: TensorRecord, seconds: float
) -> None:
    """Append the line of a merged tensor to the file under `report:`, which may be new."""
    own = tensor_record(method, settings, record, seconds)
    text = own.model_dump_json(exclude_defaults=True) + "\n"
    with _LOCK, open(settings.parameters["report"], "ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":  # a kill cut off the last line; it takes no other with it
                text = "\n" + text
        file.write(text.encode())


_START = b'{"tensor":'


def report_path(path: str) -> str:
    """Check, before hours of merging, that a path is of a report or of a file that can be one."""
    target = Path(path).expanduser().absolute()
    if target.is_dir():
        raise ValueError("this is not the name of a file")
    if not target.parent.is_dir():
        raise ValueError(f"there is no folder {target.parent}")
    if target.is_file():
        with target.open("rb") as file:
            if not _START.startswith(file.read(len(_START))):
                raise ValueError("this file is no report, and lines would be appended to it")
    return str(target)
