# SPDX-License-Identifier: Apache-2.0
"""The file of an adapter's tensors: what its names mean, and how factors lie in it.

PEFT's linear layers change a weight (o, i) by B · A with B (o, r) and A (r, i). Conv1D and
embeddings store the transpose, convolutions have their window in A, and the matrices of a packed
parameter lie side by side: A (E · r, i) by matrix first, B (o, r · E) by rank first.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from safetensors import safe_open
from torch import Tensor

from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.checkpoint_files import PEFT_PREFIX
from mergekit_ace.headers import DTYPES, DamagedFileError, read_file_header, read_pickle

Kind = Literal["linear", "transposed", "embedding", "convolution", "parameter", "bias", "saved"]
_FACTOR = re.compile(r"(.+)\.lora_(embedding_)?([AB])(?:\.(weight|bias))?")

_COPY = re.compile(r"\.(?:original_module|modules_to_save)\.")


@dataclass
class Factors:
    """The names of the tensors that an adapter has for one module.

    Attributes:
        first: A.
        second: B.
        bias: of B, of `lora_bias`.
        embedding: whether they are those of a table.
    """

    first: str | None = None
    second: str | None = None
    bias: str | None = None
    embedding: bool = False


@dataclass
class Content:
    """What the tensors of an adapter are, by the names that PEFT gives them.

    Attributes:
        factors: by module, with a `.base_layer` behind it for every other wrapper around this one.
        full: name in the file by name in the model.
    """

    factors: dict[str, Factors] = field(default_factory=dict)
    full: dict[str, str] = field(default_factory=dict)


class TensorFile:
    """The file of an adapter, `adapter_model.safetensors` or an old `adapter_model.bin`.

    Attributes:
        path: of it.
        shapes: by name of a tensor.
        dtypes: of all tensors.
    """

    def __init__(self, path: Path) -> None:
        """Read the header.

        Raises:
            DamagedFileError: the file is damaged, holds nothing, or something other than numbers.
        """
        self.path = path
        self._held: Mapping[str, Tensor] = {}
        headers = read_file_header(path)
        self.shapes = {name: header.shape for name, header in headers.items()}
        dtypes = {name: DTYPES[header.dtype] for name, header in headers.items()}
        self._odd = {name for name, dtype in dtypes.items() if not dtype.is_floating_point}
        self.dtypes = {dtypes[name] for name in dtypes.keys() - self._odd}
        if not self.shapes:
            raise DamagedFileError(f"{path} holds no tensors; download or save the adapter again")

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

    def content(self) -> Content:
        """Return what the tensors are.

        Raises:
            DamagedFileError: naming a tensor that PEFT would not load, or that has no second one.
        """
        found = Content()
        for name in sorted(self.shapes):
            if not name.startswith(PEFT_PREFIX):
                raise DamagedFileError(
                    f"tensor {name} of {self.path} lacks the prefix {PEFT_PREFIX}, without which "
                    "PEFT does not load it; save the adapter again by peft's save_pretrained"
                )
            self._add(found, name, name.removeprefix(PEFT_PREFIX))
        for module, factors in found.factors.items():
            self._check_pair(module, factors)
        return found

    def _add(self, found: Content, name: str, place: str) -> None:
        match = _FACTOR.fullmatch(place)
        if match is None and not (".lora_" in place or ".token_adapter." in place):
            self._add_full(found, name, place)
            return
        module, table, letter, leaf = match.groups() if match else ("", None, "", None)
        factors = found.factors.get(module, Factors(embedding=table is not None))
        part = "bias" if leaf == "bias" else "first" if letter == "A" else "second"
        misnamed = (leaf is None) != (table is not None) or (letter == "A" and leaf == "bias")
        twice = getattr(factors, part) is not None or factors.embedding != (table is not None)
        if match is None or misnamed or twice or name in self._odd:
            raise DamagedFileError(
                f"tensor {name} of {self.path} is none that PEFT loads as part of a plain LoRA "
                "adapter; save the adapter again by peft's save_pretrained, or merge full models "
                "with mergekit-yaml"
            )
        found.factors[module] = factors
        setattr(factors, part, name)

    def _add_full(self, found: Content, name: str, place: str) -> None:
        # with `bias: all`, PEFT writes the biases of modules that it keeps whole three times
        copied = _COPY.sub(".", place)
        if copied != place and PEFT_PREFIX + copied in self.shapes:
            return
        plain = place.replace(".base_layer.", ".")
        if plain in found.full:
            raise DamagedFileError(
                f"{self.path} holds {plain} twice, as {found.full[plain]} and as {name}; save the "
                "adapter again by peft's save_pretrained"
            )
        found.full[plain] = name

    def _check_pair(self, module: str, factors: Factors) -> None:
        """Raise unless A and B are there and can be multiplied."""
        if factors.first is None or factors.second is None:
            there, lacking = ("A", "B") if factors.second is None else ("B", "A")
            raise DamagedFileError(
                f"{self.path} has lora_{there} of {module} without lora_{lacking}; download or "
                "save the adapter again"
            )
        first, second = self.shapes[factors.first], self.shapes[factors.second]
        whole = len(first) == len(second) >= 2 and 0 not in first and 0 not in second
        if not whole or first[0] != second[1] or set(second[2:]) - {1}:
            raise DamagedFileError(
                f"{self.path} has A {first} and B {second} of {module}, which cannot be "
                "multiplied; save the adapter again, with all shards of the training gathered "
                "(convolutions of several groups cannot be merged)"
            )
        if factors.bias is not None and self.shapes[factors.bias] != second[:1]:
            raise DamagedFileError(
                f"tensor {factors.bias} of {self.path} is {self.shapes[factors.bias]} instead of "
                f"{second[:1]}; save the adapter again"
            )


def from_peft(
    kind: Kind,
    first: Tensor,
    second: Tensor,
    shape: tuple[int, ...],
    swapped: bool = False,
) -> LowRank:
    """Return the change of a stored tensor from PEFT's factors.

    Args:
        kind: of the change.
        first: A, as PEFT stores it.
        second: B, likewise.
        shape: of the stored tensor.
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
        kind: of the change.
        factors: of it.
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
