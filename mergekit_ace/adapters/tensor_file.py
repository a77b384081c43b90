# SPDX-License-Identifier: Apache-2.0
"""The file of an adapter's tensors, and how factors lie in it.

PEFT's linear layers change a weight (o, i) by B · A with B (o, r) and A (r, i). Conv1D and
embeddings store the transpose, convolutions have their window in A, and the matrices of a packed
parameter lie side by side: A (E · r, i) by matrix first, B (o, r · E) by rank first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files.headers import (
    DTYPES,
    FLOATING,
    DamagedFileError,
    read_file_header,
    read_pickle,
)

Kind = Literal["linear", "transposed", "embedding", "convolution", "parameter", "saved"]


class TensorFile:
    """The file of an adapter, `adapter_model.safetensors` or an old `adapter_model.bin`.

    Attributes:
        dtypes: of all floating-point tensors.
        odd: names of the other tensors.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            DamagedFileError: the file is damaged, holds nothing, something other than numbers, or
                floating-point numbers of 8 bits.
        """
        self.path = path
        self._held: Mapping[str, Tensor] = {}
        headers = read_file_header(path)
        self.shapes = {name: header.shape for name, header in headers.items()}
        dtypes = {name: DTYPES[header.dtype] for name, header in headers.items()}
        self.dtypes = {dtype for dtype in dtypes.values() if dtype.is_floating_point}
        self.odd = {name for name, dtype in dtypes.items() if not dtype.is_floating_point}
        if not self.shapes:
            raise DamagedFileError(f"{path} holds no tensors; download or save the adapter again")
        for name, header in headers.items():
            if DTYPES[header.dtype] in self.dtypes and header.dtype not in FLOATING:
                raise DamagedFileError(
                    f"tensor {name} of {path} is in {header.dtype}, by which nothing can be "
                    "computed; save the adapter in bfloat16, float16 or float32"
                )

    def read(self, *names: str) -> list[Tensor]:
        """Return tensors as they are stored.

        Raises:
            DamagedFileError: one holds NaN or infinite numbers.
        """
        if self.path.suffix != ".safetensors" and not self._held:
            self._held = read_pickle(self.path, "cpu")
        if self._held:
            tensors = [self._held[name] for name in names]
        else:  # opened anew, so that pages that were read before are let go
            with safe_open(self.path, framework="pt") as file:
                tensors = [file.get_tensor(name) for name in names]
        for name, tensor in zip(names, tensors, strict=True):
            if not torch.isfinite(tensor).all():
                raise DamagedFileError(
                    f"tensor {name} of {self.path} holds NaN or infinite numbers: the training "
                    "went wrong, or the file is damaged; take an earlier checkpoint of it"
                )
        return tensors

    def convert(self, by: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        """Take on other names or other tensors, as a newer version of the model has them.

        Args:
            by: returns all tensors anew. What it does not change stays on disk.
        """
        shapes = {name: torch.empty(shape, device="meta") for name, shape in self.shapes.items()}
        if by(shapes).keys() == shapes.keys():
            return
        names = list(self.shapes)
        self._held = by(dict(zip(names, self.read(*names), strict=True)))
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self._held.items()}


def from_peft(
    kind: Kind,
    first: Tensor,
    second: Tensor,
    shape: tuple[int, ...],
    swapped: bool = False,
) -> LowRank:
    """Return the change of a stored tensor from PEFT's factors.

    Args:
        swapped: a packed parameter is stored (E, i, o).
    """
    if kind in ("transposed", "embedding"):
        return LowRank(first.T, second.T, shape)
    if kind == "convolution":
        return LowRank(second.flatten(1), first.flatten(1), shape)
    if kind == "parameter" and len(shape) == 3:
        count = shape[0]
        rows = first.reshape(count, -1, first.shape[1])
        columns = second.reshape(second.shape[0], -1, count).permute(2, 0, 1)
        if swapped:
            return LowRank(rows.mT, columns.mT, shape)
        return LowRank(columns, rows, shape)
    return LowRank(second, first, shape)


def to_peft(kind: Kind, factors: LowRank, swapped: bool = False) -> tuple[Tensor, Tensor]:
    """Return A and B, as PEFT stores them, of the change of a stored tensor.

    Args:
        swapped: a packed parameter is stored (E, i, o).
    """
    left, right, shape = factors.left, factors.right, factors.shape
    if kind in ("transposed", "embedding"):
        return left.T, right.T
    if kind == "convolution":
        window = shape[2:]
        return right.reshape(-1, shape[1], *window), left.reshape(*left.shape, *(1 for _ in window))
    if kind == "parameter" and len(shape) == 3:
        columns, rows = (right.mT, left.mT) if swapped else (left, right)
        return rows.flatten(0, 1), columns.permute(1, 2, 0).flatten(1)
    return right, left
