# SPDX-License-Identifier: Apache-2.0
"""An adapter written tensor by tensor, as PEFT, transformers and vLLM load it.

PEFT reads one file, whose header comes first: room for it is left, and it is written at the end.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mergekit_ace.adapters.lora_config import MERGE_MODELS
from mergekit_ace.adapters.orientation import to_peft
from mergekit_ace.adapters.peft_adapter import Adapter, Change
from mergekit_ace.adapters.tensor_file import PEFT_PREFIX
from mergekit_ace.adapters.written_config import Written, config_text
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files import flush_to_disk, write_text

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
}
_ENTRY = 250  # characters of a tensor's entry in the header, besides its name


class AdapterWriter:
    """A folder that becomes an adapter.

    Tensors lie in `adapter_model.safetensors.partial` until all of them are there. An adapter that
    was in the folder before stays until then; without `adapter_config.json`, which comes last, the
    folder is none that anything loads.

    Args:
        folder: made if it is not there. What is no part of an adapter stays.
        adapters: that are merged. Only what these change can be added.
        base: the model that the result belongs to, as its config names it.
        dtype: of all tensors.
        revision: of the base.

    Raises:
        ValueError: the folder holds one of the adapters, or PEFT could not load what they make.
    """

    def __init__(
        self,
        folder: str | os.PathLike,
        adapters: Sequence[Adapter],
        base: str,
        dtype: torch.dtype,
        revision: str | None = None,
    ) -> None:
        self.folder = Path(folder)
        self._adapters, self._base, self._dtype = adapters, base, dtype
        self._revision = revision
        self._check_folder()
        self._changes = _united(adapters)
        self._places: list[tuple[Change, str, tuple[int, ...], int]] = []
        self._end = 0

    def _check_folder(self) -> None:
        for adapter in self._adapters:
            if self.folder.exists() and self.folder.samefile(adapter.folder):
                raise ValueError(
                    f"{self.folder} is the adapter {adapter.name}, which is merged; choose another "
                    "folder for the result"
                )

    def __enter__(self) -> AdapterWriter:
        """Open the file of tensors."""
        self._new = not self.folder.exists()
        self.folder.mkdir(parents=True, exist_ok=True)
        self._config = self.folder / "adapter_config.json"
        self._weights = self.folder / "adapter_model.safetensors"
        self._partial = self.folder / "adapter_model.safetensors.partial"
        self._partial.unlink(missing_ok=True)  # of an earlier run, or a link
        self._room = self._header_room()
        self._file = open(self._partial, "wb")
        self._file.seek(8 + self._room)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Complete the folder, or leave it as it was."""
        try:
            if kind is None:
                self._complete()
        finally:
            self._file.close()
            self._partial.unlink(missing_ok=True)
            if kind is not None and self._new and not any(self.folder.iterdir()):
                self.folder.rmdir()

    def add_low_rank(self, change: Change, factors: LowRank) -> None:
        """Write the change of a tensor.

        Args:
            change: of one of the adapters.
            factors: in the orientation of the stored tensor, to be added as they are. A rank of 0
                is written as a rank of 1 that is zero, as PEFT knows no other.

        Raises:
            ValueError: they hold NaN, or more than the dtype can.
        """
        first, second = to_peft(change.kind, _at_least_one(factors), change.swapped)
        self._write(change, "A", first)
        self._write(change, "B", second)

    def add_full(self, change: Change, tensor: Tensor) -> None:
        """Write what is added to a bias, or a saved tensor.

        Raises:
            ValueError: it holds NaN, or more than the dtype can.
        """
        self._write(change, "", tensor)

    def _write(self, change: Change, letter: str, tensor: Tensor) -> None:
        stored = tensor.to("cpu", self._dtype).contiguous()
        if not torch.isfinite(stored).all():
            raise ValueError(
                f"the merged {change.name} holds NaN, or numbers that {self._dtype} cannot; write "
                "the adapter in bfloat16 or float32"
            )
        self._places.append((change, letter, tuple(stored.shape), self._end))
        self._end += self._file.write(memoryview(stored.reshape(-1).view(torch.uint8).numpy()))

    def _complete(self) -> None:
        """Write what is missing, the header and the config."""
        if not self._places:
            raise ValueError("the adapters change nothing that could be written")
        self._add_missing_biases()
        header = json.dumps(self._header(), separators=(",", ":")).encode()
        if len(header) > self._room:
            raise AssertionError(f"the header has {len(header)} bytes, and room is {self._room}")
        self._file.seek(0)
        self._file.write(struct.pack("<Q", self._room) + header.ljust(self._room))
        self._file.close()
        flush_to_disk(self._partial)
        for path in (self._config, self.folder / "adapter_model.bin"):
            path.unlink(missing_ok=True)  # of an earlier result, which is whole until here
        os.replace(self._partial, self._weights)
        text = config_text(self._written(), self._adapters, self._base, self._revision)
        write_text(self._config, text, durable=True)

    def _add_missing_biases(self) -> None:
        """Add zeros to the biases of other modules: with `lora_bias`, PEFT expects all of them."""
        biased = {change.module for change, *_ in self._places if change.kind == "bias"}
        for change, letter, shape, _ in list(self._places) if biased else ():
            if letter == "B" and change.module not in biased:
                bias = Change(f"{change.module}.bias", change.module, "bias", shape[:1], None)
                self._write(bias, "", torch.zeros(shape[0]))

    def _written(self) -> Written:
        """Return what the file holds."""
        written = Written()
        whole = {
            change.module
            for change, *_ in self._places
            if change.kind == "saved" and not change.name.endswith(".bias")
        }
        for change, letter, shape, _ in self._places:
            if change.kind == "parameter" and letter == "A":
                count = change.shape[0] if len(change.shape) == 3 else 1
                written.parameters[change.name] = shape[0] // count
            elif letter == "A":
                written.modules[change.module] = shape[0]
                written.transposed |= change.kind == "transposed"
            elif change.kind == "saved":
                (written.saved if change.module in whole else written.biases).add(change.module)
            elif change.kind == "bias":
                written.lora_bias = True
        return written

    def _header(self) -> dict:
        """Return the header of the safetensors file."""
        size = self._dtype.itemsize
        header: dict = {"__metadata__": {"format": "pt"}}
        wrappers = self._wrappers({change.name for change, *_ in self._places})
        with_factors = {c.module for c, letter, *_ in self._places if letter == "A"}
        for change, letter, shape, start in self._places:
            wrapped = change.module in with_factors
            name = PEFT_PREFIX + _peft_name(change, letter, wrapped, wrappers.get(change.name, ""))
            count = 1
            for length in shape:
                count *= length
            header[name] = {
                "dtype": _DTYPES[self._dtype],
                "shape": list(shape),
                "data_offsets": [start, start + count * size],
            }
        assert len(header) == 1 + len(self._places), "a change was added twice"
        return header

    def _wrappers(self, names: set[str]) -> dict[str, str]:
        """Return what PEFT puts behind the module of a parameter, by the parameter's name.

        Of several parameters of one module, the last one has the outermost wrapper.
        """
        found = {}
        network = next((a.network for a in self._adapters if a.network is not None), None)
        modules = {c.module for c in self._changes.values() if c.kind == "parameter"}
        for module in modules if network is not None else ():
            holder = network.get_submodule(module)
            own = [f"{module}.{name}" for name, _ in holder.named_parameters(recurse=False)]
            targeted = [name for name in own if name in names]
            for depth, name in enumerate(reversed(targeted)):
                found[name] = ".base_layer" * depth
        return found

    def _header_room(self) -> int:
        """Return the bytes that the header takes at most, a multiple of 8."""
        room = 100 + sum(3 * (len(name) + _ENTRY) for name in self._changes)
        return -(-room // 8) * 8


def _united(adapters: Sequence[Adapter]) -> dict[str, Change]:
    """Return what several adapters change.

    Raises:
        ValueError: they change a tensor in different ways, or in ways that PEFT does not combine.
    """
    found: dict[str, tuple[Change, Adapter]] = {}
    for adapter in adapters:
        for name, change in adapter.changes.items():
            first, its = found.setdefault(name, (change, adapter))
            if (first.kind, first.shape) != (change.kind, change.shape):
                raise ValueError(
                    f"{name} is {first.kind} {first.shape} in the adapter {its.name} and "
                    f"{change.kind} {change.shape} in {adapter.name}, which cannot be one adapter; "
                    f"{MERGE_MODELS}"
                )
    changes = {name: change for name, (change, _) in found.items()}
    kinds = {change.kind: change for change in changes.values()}
    without = kinds.get("embedding") or kinds.get("parameter")
    if "bias" in kinds and without is not None:
        raise ValueError(
            f"{kinds['bias'].name} is trained with `lora_bias` in one adapter, and {without.name} "
            f"is changed in another, which PEFT does not load as one; {MERGE_MODELS}"
        )
    return changes


def _at_least_one(factors: LowRank) -> LowRank:
    """Return factors of rank 1 that are zero for those of rank 0."""
    if factors.rank:
        return factors
    left, right = factors.left, factors.right
    return LowRank(
        left.new_zeros(*left.shape[:-1], 1),
        right.new_zeros(*right.shape[:-2], 1, right.shape[-1]),
        factors.shape,
    )


def _peft_name(change: Change, letter: str, wrapped: bool, wrappers: str) -> str:
    """Return the name of a tensor in PEFT's file, without the prefix.

    Args:
        change: that it belongs to.
        letter: A, B, or nothing for a whole tensor.
        wrapped: whether the module has factors.
        wrappers: of a parameter, the wrappers around its own.
    """
    if letter and change.kind == "embedding":
        return f"{change.module}.lora_embedding_{letter}"
    if letter:
        return f"{change.module}{wrappers}.lora_{letter}.weight"
    if change.kind == "bias":
        return f"{change.module}.lora_B.bias"
    return f"{change.module}.base_layer.bias" if wrapped else change.name
