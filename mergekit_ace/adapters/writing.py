# SPDX-License-Identifier: Apache-2.0
"""An adapter written as PEFT, transformers and vLLM load it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

import torch
from torch import Tensor

from mergekit_ace.adapters.lora_config import MERGE_MODELS
from mergekit_ace.adapters.peft_adapter import Adapter, Change
from mergekit_ace.adapters.tensor_file import PEFT_PREFIX, to_peft
from mergekit_ace.adapters.written_config import Written, config_text
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files import flush_to_disk, save_tensors, write_text


class AdapterWriter:
    """A folder that becomes an adapter, once all tensors are added.

    An adapter that was in the folder before stays until then; without `adapter_config.json`, which
    comes last, the folder is none that anything loads.

    Args:
        folder: made if it is not there. What is no part of an adapter stays.
        adapters: that are merged. Only what these change can be added.
        base: the model that the result belongs to, as its config names it.
        dtype: of all tensors.
        revision: of the base.

    Raises:
        ValueError: PEFT could not load what the adapters make.
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
        self._changes = _united(adapters)
        self._places: list[tuple[Change, str, Tensor]] = []

    def __enter__(self) -> AdapterWriter:
        """Take tensors."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Write the folder, or leave it as it was."""
        if kind is None:
            self._complete()

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
        self._add(change, "A", first)
        self._add(change, "B", second)

    def add_full(self, change: Change, tensor: Tensor) -> None:
        """Write what is added to a bias, or a saved tensor.

        Raises:
            ValueError: it holds NaN, or more than the dtype can.
        """
        self._add(change, "", tensor)

    def _add(self, change: Change, letter: str, tensor: Tensor) -> None:
        stored = tensor.to("cpu", self._dtype).clone(memory_format=torch.contiguous_format)
        if not torch.isfinite(stored).all():
            raise ValueError(
                f"the merged {change.name} holds NaN, or numbers that {self._dtype} cannot; write "
                "the adapter in bfloat16 or float32"
            )
        self._places.append((change, letter, stored))

    def _complete(self) -> None:
        """Write all tensors, and the config that belongs to them."""
        if not self._places:
            raise ValueError("the adapters change nothing that could be written")
        self._add_missing_biases()
        self.folder.mkdir(parents=True, exist_ok=True)
        weights = self.folder / "adapter_model.safetensors"
        config = self.folder / "adapter_config.json"
        staged = weights.with_suffix(".new")
        save_tensors(staged, self._named(), {"format": "pt"})
        flush_to_disk(staged)
        for path in (config, self.folder / "adapter_model.bin"):
            path.unlink(missing_ok=True)  # of an earlier result, which is whole until here
        os.replace(staged, weights)
        text = config_text(self._written(), self._adapters, self._base, self._revision)
        write_text(config, text, durable=True)

    def _add_missing_biases(self) -> None:
        """Add zeros to the biases of other modules: with `lora_bias`, PEFT expects all of them."""
        biased = {change.module for change, *_ in self._places if change.kind == "bias"}
        for change, letter, tensor in list(self._places) if biased else ():
            if letter == "B" and change.module not in biased:
                name, shape = f"{change.module}.bias", (len(tensor),)
                bias = Change(name, change.module, "bias", shape, None)
                self._add(bias, "", torch.zeros(shape))

    def _written(self) -> Written:
        """Return what the file holds."""
        written = Written()
        whole = {
            change.module
            for change, *_ in self._places
            if change.kind == "saved" and not change.name.endswith(".bias")
        }
        for change, letter, tensor in self._places:
            if change.kind == "parameter" and letter == "A":
                count = change.shape[0] if len(change.shape) == 3 else 1
                written.parameters[change.name] = len(tensor) // count
            elif letter == "A":
                written.modules[change.module] = len(tensor)
                written.transposed |= change.kind == "transposed"
            elif change.kind == "saved":
                (written.saved if change.module in whole else written.biases).add(change.module)
            elif change.kind == "bias":
                written.lora_bias = True
        return written

    def _named(self) -> dict[str, Tensor]:
        """Return the tensors by their names in PEFT's file."""
        wrappers = self._wrappers({change.name for change, *_ in self._places})
        with_factors = {c.module for c, letter, _ in self._places if letter == "A"}
        found = {}
        for change, letter, tensor in self._places:
            own = wrappers.get(change.name, "")
            name = _peft_name(change, letter, change.module in with_factors, own)
            found[PEFT_PREFIX + name] = tensor
        assert len(found) == len(self._places), "a change was added twice"
        return found

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
