# SPDX-License-Identifier: Apache-2.0
"""The models of a merge without their weights: in folders, in the Hub's cache, or on the Hub."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from mergekit.architecture import WeightInfo
from mergekit.architecture.conversion import convert_checkpoint_tensors
from mergekit.common import ModelReference
from mergekit.io import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.tasks import LoaderCache
from safetensors import safe_open

from mergekit_ace.files.checkpoints import (
    INDEX_FILES,
    check_reference,
    existing_folder,
    weight_files,
)
from mergekit_ace.files.headers import (
    DTYPE_NAMES,
    DTYPES,
    FLOATING,
    DamagedFileError,
    TensorHeader,
    json_or_empty,
    read_headers,
)
from mergekit_ace.files.model_files import find_model_file
from mergekit_ace.files.quantised import find_quantisation
from mergekit_ace.naming import layer_of

SAMPLED_ENTRIES = 2**18  # of a matrix, to tell the precision of a checkpoint


@dataclass(frozen=True)
class Checkpoint:
    """One model without its weights.

    Attributes:
        model: mergekit's reference; the headers of an adapter's are those of its base.
        folder: where its files are; None on the Hub.
        quantised: the method of what is dequantised when it is read, so that index and headers are
            those of the result.
    """

    model: ModelReference
    folder: Path | None
    index: ShardedTensorIndex
    headers: Mapping[str, TensorHeader]
    quantised: str = ""

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`; empty where there is none."""
        return self.read_json("config.json")

    @property
    def labels(self) -> int:
        """The number of labels of a classifier; transformers writes none where there are two."""
        return len(self.config.get("id2label") or (0, 1))

    def read_json(self, name: str) -> dict[str, Any]:
        """Read a small JSON file of the checkpoint; it is fetched if the model is on the Hub."""
        return json_or_empty(self.file(name))

    def file(self, name: str) -> Path | None:
        """Return where a small file of the checkpoint lies; None where there is none."""
        if self.folder is not None and (self.folder / name).is_file():
            return self.folder / name
        return find_model_file(self.model.model, name)  # not every file of the Hub is in its cache

    @property
    def bytes(self) -> int:
        """The bytes of all tensors."""
        return sum(header.bytes for header in self.headers.values())

    @cached_property
    def entries_by_dtype(self) -> Counter[str]:
        """The number of entries that are stored in each dtype."""
        counts: Counter[str] = Counter()
        for header in self.headers.values():
            counts[header.dtype] += header.entries
        return counts

    @property
    def main_dtype(self) -> str:
        """The dtype of most entries; empty where headers tell nothing."""
        return next((name for name, _ in self.entries_by_dtype.most_common(1)), "")

    def source(self, weight: WeightInfo) -> TensorHeader | None:
        """Return what mergekit reads for a planned tensor; None where there is nothing of it.

        It is stored so, or packed from several stored tensors as transformers has it in memory.
        """
        names = (weight.name, *(weight.aliases or ()))
        for name in (*names, *(weight.tied_names or ())):
            if name in self.headers:
                return self.headers[name]
        for name in names:
            if name not in self._packed:
                self._packed[name] = self._pack(name)
        return next((self._packed[name] for name in names if self._packed[name]), None)

    @cached_property
    def _packed(self) -> dict[str, TensorHeader | None]:
        return {}

    def _pack(self, name: str) -> TensorHeader | None:
        """Pack tensors without entries; of its layer only, as there may be ten thousands."""
        layer = layer_of(name)
        near = [n for n in self.headers if layer is None or layer_of(n) == layer]
        parts = {n: empty_tensor(self.headers[n]) for n in near or self.headers}
        try:
            packed = convert_checkpoint_tensors(self.config.get("model_type"), parts, name)
        except Exception:  # parts that do not fit together, which mergekit will say
            return None
        if packed is None:
            return None
        return TensorHeader(DTYPE_NAMES.get(packed.dtype, "F32"), tuple(packed.shape), "")

    @cached_property
    def precision(self) -> str:
        """The precision that the values have, by two matrices of every file; empty if unknown.

        A checkpoint that was widened when it was saved still has the values of a narrower dtype.
        """
        matrices: dict[str, list[tuple[int, str]]] = {}
        for name, header in self.headers.items() if self.folder and not self.quantised else ():
            readable = header.file.endswith(".safetensors") and header.dtype in FLOATING
            if readable and len(header.shape) > 1 and header.entries:
                matrices.setdefault(header.file, []).append((header.entries, name))
        dtypes = set()
        for path, sizes in matrices.items():
            sizes.sort()
            with safe_open(path, framework="pt") as file:
                for _, name in {sizes[-1], sizes[len(sizes) // 2]}:
                    rows = 1 + SAMPLED_ENTRIES // math.prod(self.headers[name].shape[1:])
                    dtypes.add(coarsest_dtype(file.get_slice(name)[:rows]))
        finest = min(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)
        return DTYPE_NAMES[finest] if finest else ""


Checkpoints = Mapping[ModelReference, Checkpoint]


def empty_tensor(header: TensorHeader) -> torch.Tensor:
    """Return a tensor of that shape and dtype without entries in memory."""
    dtype = DTYPES.get(header.dtype, torch.float32)
    return torch.empty(header.shape, dtype=dtype, device="meta")


def coarsest_dtype(tensor: torch.Tensor) -> torch.dtype:
    """Return the coarsest dtype that holds every value of a tensor."""
    coarser = (torch.bfloat16, torch.float16, torch.float32)
    return next(
        (d for d in coarser if torch.equal(tensor.to(d).to(tensor.dtype), tensor)), tensor.dtype
    )


def read_checkpoint(model: ModelReference) -> Checkpoint:
    """Read the headers of a model, wherever it is; no weight is read or downloaded.

    Raises:
        DamagedFileError: a file is damaged, or there is no such model.
    """
    check_reference(model)  # first: mergekit opens single files without saying which is damaged
    folder = existing_folder(model.model.path) or _snapshot(model)
    if folder is None:
        return _from_hub(model)
    return checkpoint_of(model, ShardedTensorIndex.from_disk(str(folder)))


def checkpoint_of(model: ModelReference, index: ShardedTensorIndex) -> Checkpoint:
    """Return the headers of a model that lies in a folder.

    Raises:
        DamagedFileError: a file is missing or damaged.
    """
    headers = read_headers(index.tensor_paths, index.base_path)
    return _dequantised(Checkpoint(model, Path(index.base_path), index, headers))


def _dequantised(checkpoint: Checkpoint) -> Checkpoint:
    headers, index = checkpoint.headers, checkpoint.index
    found = find_quantisation(checkpoint.config, headers)
    if found is None:
        return checkpoint
    return replace(
        checkpoint,
        index=found.index(index),
        headers=found.headers(headers),
        quantised=found.method,
    )


def _snapshot(model: ModelReference) -> Path | None:
    """Return the snapshot of a model in the Hub's cache, if it holds all weights.

    One that was only looked at has the index, and one whose download was cut off some of the files.
    """
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    for name in INDEX_FILES:
        try:
            found = try_to_load_from_cache(model.model.path, name, revision=model.model.revision)
        except HFValidationError:  # told when the Hub is asked
            return None
        if isinstance(found, str):
            folder = Path(found).parent
            return folder if all(path.exists() for path in weight_files(folder)) else None
    return None


def _from_hub(model: ModelReference) -> Checkpoint:
    from huggingface_hub import get_safetensors_metadata

    try:
        metadata = get_safetensors_metadata(model.model.path, revision=model.model.revision)
    except Exception as error:
        why = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
        raise DamagedFileError(
            f"{model.model.path} is no folder in {Path.cwd()}, and no model of the Hub that can be "
            f"read by its safetensors ({why}); correct the name, or download the model first"
        ) from error
    headers = {
        name: TensorHeader(info.dtype, tuple(info.shape), file)
        for file, content in metadata.files_metadata.items()
        for name, info in content.tensors.items()
    }
    paths = {name: header.file for name, header in headers.items()}
    return _dequantised(Checkpoint(model, None, ShardedTensorIndex("", True, paths, []), headers))


@contextmanager
def own_loaders() -> Iterator[None]:
    """Leave mergekit's cache of opened models as it is: other merges of the process use it, too."""
    loaders = LoaderCache().loaders
    before = dict(loaders)
    try:
        yield
    finally:
        loaders.clear()
        loaders.update(before)


@contextmanager
def headers_only(checkpoints: Sequence[Checkpoint]) -> Iterator[None]:
    """Let mergekit plan with these indices, so that it downloads nothing and merges no adapter."""
    with own_loaders():
        for checkpoint in checkpoints:
            LoaderCache().loaders[checkpoint.model] = LazyTensorLoader(checkpoint.index)
        yield
