# SPDX-License-Identifier: Apache-2.0
"""Models of a merge without their weights, in folders, in the Hub's cache, or on the Hub.

Also the files beside weights and config that mergekit leaves out of most results; and quantised
checkpoints, of which each tensor is dequantised to bfloat16 when it is read: FP8 with scales by
block, row or tensor (DeepSeek's and compressed-tensors' formats), and MXFP4 (gpt-oss), both by
transformers' own functions.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from mergekit.architecture import WeightInfo
from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.tasks import LoaderCache
from torch import Tensor

from mergekit_ace.files.checkpoints import (
    TensorHeader,
    check_reference,
    existing_folder,
    hub_file,
    json_or_empty,
    read_headers,
    unreachable,
)
from mergekit_ace.naming import FileError

GENERATION = "generation_config.json"
MORE_TEMPLATES = "additional_chat_templates"
TOKENIZER_CONFIG = "tokenizer_config.json"
# One of them is there wherever transformers can load a tokenizer.
VOCABULARY_FILES = (
    "tokenizer.json", "tokenizer.model", TOKENIZER_CONFIG, "vocab.json", "vocab.txt",
    "spiece.model", "sentencepiece.bpe.model", "tekken.json",
)  # fmt: skip
TOKENIZER_FILES = (
    *VOCABULARY_FILES, "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template.jinja",
)  # fmt: skip
_TEMPLATES = ("chat_template.jinja", "chat_template.json")
_PROCESSORS = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
# Of an earlier result, these would be read as part of one that has none.
READ_BESIDE = (*TOKENIZER_FILES, GENERATION, *_PROCESSORS, "chat_template.json")
# What mergekit copies with a tokenizer that it takes as it is.
_COPIED = (GENERATION, "video_preprocessor_config.json", *_TEMPLATES)
_FP8_SCALES = ("_scale_inv", "_scale")  # behind the name of a weight
_OF_INPUTS = (".input_scale", ".output_scale", ".k_scale", ".v_scale")  # of no use to a weight
_BLOCK = 32  # entries of MXFP4 with one scale


@dataclass(frozen=True)
class Checkpoint:
    """One model without its weights."""

    model: ModelReference  # the headers of an adapter's are those of its base
    folder: Path | None  # where its files are; None on the Hub
    headers: Mapping[str, TensorHeader]
    quantised: str = ""  # method of what is dequantised when read: headers are of the result

    @cached_property
    def index(self) -> ShardedTensorIndex:
        """What mergekit's planner reads."""
        paths = {name: header.file for name, header in self.headers.items()}
        return ShardedTensorIndex("", True, paths, [])

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
        """The dtype of most entries; empty without tensors."""
        return next((name for name, _ in self.entries_by_dtype.most_common(1)), "")

    def source(self, weight: WeightInfo) -> TensorHeader | None:
        """Return what mergekit reads for a planned tensor; None where there is nothing of it."""
        return next((self.headers[n] for n in names_of(weight) if n in self.headers), None)


def names_of(weight: WeightInfo) -> tuple[str, ...]:
    """Return all names under which mergekit looks for a weight, in its order."""
    return (weight.name, *(weight.aliases or ()), *(weight.tied_names or ()))


Checkpoints = Mapping[ModelReference, Checkpoint]


def read_checkpoint(model: ModelReference) -> Checkpoint:
    """Read the headers of a model, wherever it is; no weight is read or downloaded."""
    from huggingface_hub import get_safetensors_metadata, snapshot_download

    check_reference(model)  # first: mergekit opens single files without saying which is damaged
    source = model.model
    if folder := existing_folder(source.path):
        return checkpoint_of(model, folder)
    name, revision = source.path, source.revision
    with suppress(Exception):  # a snapshot in the cache may lack files
        known = snapshot_download(name, revision=revision, local_files_only=True)
        return checkpoint_of(model, Path(known))
    try:
        metadata = get_safetensors_metadata(name, revision=revision)
    except Exception as error:
        raise unreachable(source, error) from error
    headers = {
        name: TensorHeader(info.dtype, tuple(info.shape), file)
        for file, content in metadata.files_metadata.items()
        for name, info in content.tensors.items()
    }
    return _dequantised(Checkpoint(model, None, headers))


def checkpoint_of(model: ModelReference, folder: Path) -> Checkpoint:
    """Return the headers of a model that lies in a folder."""
    return _dequantised(Checkpoint(model, folder, read_headers(folder)))


def _dequantised(checkpoint: Checkpoint) -> Checkpoint:
    """Return what can be read of a checkpoint, which may be quantised."""
    found = find_quantisation(checkpoint.config, checkpoint.headers)
    if found is None:
        return checkpoint
    headers = found.headers(checkpoint.headers)
    return replace(checkpoint, headers=headers, quantised=found.method)


@contextmanager
def own_loaders() -> Iterator[None]:
    """Start with an empty cache of mergekit's opened models, and leave the former as it was."""
    loaders = LoaderCache().loaders
    before = dict(loaders)
    loaders.clear()
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


def config_donor(config: MergeConfiguration) -> ModelReference:
    """Return the model whose `config.json` the result has."""
    return config.base_model or config.referenced_models()[0]


def tokenizer_donor(config: MergeConfiguration) -> ModelReference:
    """Return the model whose tokens have the same numbers in the result."""
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    return source if isinstance(source, ModelReference) else config_donor(config)


def find_model_file(
    model: ModelPath, name: str, *, beside: Path = Path(), cache: str | None = None
) -> Path | None:
    """Return where a small file of a model lies; None where it has none, or is not to be had.

    Relative names are looked for in `beside`, too; `cache` is for models on the Hub.
    """
    for folder in (Path(model.path).expanduser(), beside / model.path):
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
    with suppress(FileError):
        return hub_file(model, name, cache_dir=cache)
    return None


def add_model_files(
    config: MergeConfiguration, folder: Path, *, beside: Path = Path(), cache: str | None = None
) -> dict[str, ModelReference]:
    """Copy what a result lacks of its models' files; return whose files were added, by name.

    Code is copied, not run. Nothing that is there is touched.
    """
    find = partial(find_model_file, beside=beside, cache=cache)
    present = {path.name for path in folder.iterdir()}
    missing = _missing_files(config, present, find)
    settings = folder / TOKENIZER_CONFIG
    own = json_or_empty(settings).get("chat_template") or config.chat_template
    if settings.is_file() and not own and present.isdisjoint(_TEMPLATES):
        speaker = tokenizer_donor(config)
        templates = {name: find(speaker.model, name) for name in _TEMPLATES}
        missing |= {name: (speaker, path) for name, path in templates.items() if path}
    for name, (_, source) in missing.items():
        shutil.copyfile(source, folder / name)
    return {name: model for name, (model, _) in missing.items()}


def lost_model_files(
    config: MergeConfiguration, kept: Collection[str]
) -> dict[str, ModelReference]:
    """Return what `mergekit-yaml` would leave out, but for `kept`: models by names of files."""
    base = config_donor(config).model
    loaded = any(find_model_file(base, f"tokenizer.{end}") for end in ("json", "model"))
    built = config.tokenizer or config.tokenizer_source or config.chat_template
    if loaded and not built and find_model_file(base, TOKENIZER_CONFIG):
        kept = {*kept, *_COPIED}
    missing = _missing_files(config, kept, find_model_file)
    return {name: model for name, (model, _) in missing.items()}


def _missing_files(
    config: MergeConfiguration, present: Collection[str], find: Callable[..., Path | None]
) -> dict[str, tuple[ModelReference, Path]]:
    """Return what a result lacks of the models that it has its config and tokenizer of.

    The generation config names end tokens by their numbers, so it comes from the same model as the
    tokenizer.
    """
    donor = config_donor(config)
    expected = {GENERATION: tokenizer_donor(config), **dict.fromkeys(_PROCESSORS, donor)}
    settings = find(donor.model, "config.json")
    code = json_or_empty(settings).get("auto_map")
    if settings and code and "--" not in str(code):  # else it names the Hub's repository
        expected |= {path.name: donor for path in settings.parent.glob("*.py")}
    found = {n: (m, find(m.model, n)) for n, m in expected.items() if n not in present}
    return {n: (m, path) for n, (m, path) in found.items() if path and not _is_derived(path)}


def _is_derived(path: Path) -> bool:
    """Tell whether transformers makes a generation config from `config.json`, whenever it loads."""
    own, config = json_or_empty(path), json_or_empty(path.with_name("config.json"))
    shared = own.keys() & config.keys() - {"transformers_version"}  # of whoever wrote the file
    made = path.name == GENERATION and own.get("_from_model_config")  # and may be edited since
    return bool(made) and all(own[name] == config[name] for name in shared)


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

    def headers(self, headers: Mapping[str, TensorHeader]) -> dict[str, TensorHeader]:
        """Return the headers of what can be read."""
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
    block = settings.get("weight_block_size")
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


def open_quantised(models: Iterable[ModelReference]) -> None:
    """Let mergekit's cache read quantised models dequantised."""
    cache = LoaderCache()
    for model in models:
        loader = cache.get(model)
        config = json_or_empty(Path(loader.index.base_path, "config.json"))
        quantisation = find_quantisation(config, loader.index.tensor_paths)
        if quantisation and not isinstance(loader, DequantisingLoader):
            cache.loaders[model] = DequantisingLoader(loader, quantisation)
