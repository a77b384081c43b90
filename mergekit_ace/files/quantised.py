# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints, of which each tensor is dequantised to bfloat16 when it is read.

FP8 with scales by block, row or tensor (DeepSeek's and compressed-tensors' formats), and MXFP4
(gpt-oss), both by transformers' own functions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from mergekit.io import LazyTensorLoader
from torch import Tensor

_FP8_SCALES = ("_scale_inv", "_scale")  # behind the name of a weight
# of no use to a weight
_OF_INPUTS = (".input_scale", ".output_scale", "activation_scale", ".k_scale", ".v_scale")
_BLOCK = 32  # entries of MXFP4 with one scale


@dataclass(frozen=True)
class Quantisation:
    """How a checkpoint is quantised."""

    method: str  # `fp8` or `mxfp4`
    block: tuple[int, int] | None  # rows and columns with one scale; None where the shapes tell
    sources: Mapping[str, tuple[str, str]]  # names of codes and scales by that of their tensor

    def readable(self, stored: Mapping[str, Any]) -> dict[str, Any]:
        """Return the entries of what can be read; a tensor has that of its codes."""
        used = {name for pair in self.sources.values() for name in pair}
        kept = {n: v for n, v in stored.items() if n not in used and not n.endswith(_OF_INPUTS)}
        return kept | {name: stored[codes] for name, (codes, _) in self.sources.items()}

    def headers(self, headers: Mapping[str, Any]) -> dict[str, Any]:
        """Return the `TensorHeader` of all that can be read."""
        kept = self.readable(headers)
        for name in self.sources:
            shape = kept[name].shape
            if self.method == "mxfp4":  # (E, rows, blocks, bytes), and in memory (E, columns, rows)
                shape = (shape[0], shape[2] * _BLOCK, shape[1])
            kept[name] = replace(kept[name], dtype="BF16", shape=shape)
        return kept

    def dequantise(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Return a tensor in bfloat16."""
        if self.method == "mxfp4":
            from transformers.integrations.mxfp4 import convert_moe_packed_tensors

            return convert_moe_packed_tensors(codes, scales)
        from transformers.integrations.finegrained_fp8 import Fp8Dequantize

        rows, columns = codes.shape[-2:]
        if self.block and scales.ndim > 1:  # the last block may be a part of one
            grid = zip(scales.shape[-2:], self.block, (rows, columns), strict=True)
            (down, right) = (count * size - length for count, size, length in grid)
            codes = torch.nn.functional.pad(codes.float(), (0, right, 0, down))
        scales = scales.reshape(1, 1) if scales.numel() == 1 else scales
        scales = scales[:, None] if scales.ndim == 1 else scales
        whole = Fp8Dequantize(None)._dequantize_one(codes, scales, torch.bfloat16)
        return whole[..., :rows, :columns].contiguous()


def find_quantisation(config: Mapping[str, Any], stored: Mapping[str, Any]) -> Quantisation | None:
    """Return how a checkpoint is quantised; None for one that is not, or in another way.

    Args:
        config: its `config.json`.
        stored: something for each of its tensors, by name.
    """
    settings = config.get("quantization_config")
    if not isinstance(settings, dict):
        return None
    method = settings.get("quant_method")
    if method == "mxfp4":
        names = [name.removesuffix("_blocks") for name in stored if name.endswith("_blocks")]
        pairs = [(name, f"{name}_blocks", f"{name}_scales") for name in names]
    elif method == "fp8" or settings.get("format") == "float-quantized":
        method = "fp8"
        pairs = [(name, name, name + end) for name in stored for end in _FP8_SCALES]
    else:
        return None
    sources = {name: (codes, scales) for name, codes, scales in pairs if scales in stored}
    groups = (settings.get("config_groups") or {}).values()  # of compressed-tensors
    named = ((group.get("weights") or {}).get("block_structure") for group in groups)
    block = settings.get("weight_block_size") or next(filter(None, named), None)
    return Quantisation(method, tuple(block) if block else None, sources) if sources else None


class DequantisingLoader(LazyTensorLoader):
    """mergekit's loader of a checkpoint, which dequantises what it reads."""

    def __init__(self, stored: LazyTensorLoader, quantisation: Quantisation):
        paths = quantisation.readable(stored.index.tensor_paths)
        super().__init__(replace(stored.index, tensor_paths=paths), stored.lazy_unpickle)
        self.stored, self.quantisation = stored, quantisation

    def get_tensor(
        self,
        key: str,
        device: str = "cpu",
        aliases: list[str] | None = None,
        raise_on_missing: bool = True,
    ) -> Tensor | None:
        for name in (key, *(aliases or ())):
            if name in self.quantisation.sources:
                sources = self.quantisation.sources[name]
                parts: Any = (self.stored.get_tensor(source, device) for source in sources)
                return self.quantisation.dequantise(*parts)
        return self.stored.get_tensor(key, device, aliases, raise_on_missing)

    def flush(self) -> None:
        self.stored.flush()
