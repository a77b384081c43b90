# SPDX-License-Identifier: Apache-2.0
"""Models of a merge without their weights, in folders, in the Hub's cache, or on the Hub.

Also their headers, and what is wrong with their files: whatever is damaged, missing or something
else raises a `FileError`; and the files beside weights and config that mergekit leaves out of most
results.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import huggingface_hub
import torch
from huggingface_hub import errors as hub
from huggingface_hub.utils import HFValidationError, validate_repo_id
from mergekit.architecture import WeightInfo
from mergekit.common import ModelPath, ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io import LazyTensorLoader, ShardedTensorIndex
from mergekit.io.tasks import LoaderCache
from safetensors import SafetensorError, safe_open

from mergekit_ace.files.quantised import DequantisingLoader, find_quantisation
from mergekit_ace.naming import FileError

# By what a safetensors file calls them, all that mergekit reads.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64,
}  # fmt: skip
FLOATING = ("F64", "F32", "F16", "BF16")
PEFT_PREFIX = "base_model.model."  # of every tensor that PEFT writes and loads
DOWNLOADED = ("*.safetensors", "*.json", "*.model", "*.txt", "*.tiktoken", "*.jinja", "*.py")
INDEX_FILES = ("model.safetensors.index.json", "model.safetensors")  # mergekit takes the first
_AGAIN = "download or save it again"
_CONVERT = (
    "a .bin is a pickle, which may hold code; load it by transformers or PEFT and save it again by "
    "save_pretrained, in safetensors"
)
_LFS_POINTER = b"version https://git-lfs.github.com/spec"
_WEB_PAGES = (b"<!doctype html", b"<html", b"<?xml")
# By these, the Hub says that there is no such file, or no such model for us.
_ABSENT = (hub.RemoteEntryNotFoundError, hub.RepositoryNotFoundError)
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
TEMPLATES = ("chat_template.jinja", "chat_template.json")
_PROCESSORS = (
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json",
)  # fmt: skip
# Of an earlier result, these would be read as part of one that has none.
READ_BESIDE = (*TOKENIZER_FILES, GENERATION, *_PROCESSORS, "chat_template.json")
# What mergekit copies with a tokenizer that it takes as it is.
_COPIED = (GENERATION, "video_preprocessor_config.json", *TEMPLATES)


@dataclass(frozen=True)
class TensorHeader:
    """What is known of a tensor without reading it."""

    dtype: str  # as safetensors calls it, `BF16`, `F32`, …
    shape: tuple[int, ...]
    file: str

    @property
    def entries(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.entries * item_size(self.dtype)


def item_size(dtype: str) -> int:
    """Return the bytes of an entry; 4 of a dtype that mergekit does not read."""
    return DTYPES.get(dtype, torch.float32).itemsize


def check_content(path: Path) -> None:
    """Raise a `FileError` unless a file is there itself, and no pointer or web page instead."""
    if not path.is_file():
        link = f": it is a link to {os.readlink(path)}" if path.is_symlink() else ""
        raise FileError(f"{path} is missing{link}; {_AGAIN}")
    with open(path, "rb") as file:
        start = file.read(100).lstrip().lower()
    if start.startswith(_LFS_POINTER):
        raise FileError(f"{path} is a Git LFS pointer: run `git lfs pull` in {path.parent}")
    if start.startswith(_WEB_PAGES):
        raise FileError(f"{path} is a web page: {_AGAIN}, after signing in where that is asked for")


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a checkpoint."""
    check_content(path)
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, RecursionError) as error:
        raise FileError(f"{path} is damaged: it is no JSON object ({error}); {_AGAIN}") from error


def json_or_empty(path: str | os.PathLike | None) -> dict[str, Any]:
    """Return the object in a JSON file; an empty one where there is none."""
    try:
        return read_json(Path(path or ""))
    except (FileError, OSError):
        return {}


def read_file_header(path: Path) -> dict[str, TensorHeader]:
    """Return the headers of the tensors in a safetensors file."""
    if path.suffix == ".bin":
        raise FileError(f"{path} cannot be read: {_CONVERT}")
    check_content(path)
    headers = {}
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                part = file.get_slice(name)
                headers[name] = TensorHeader(part.get_dtype(), tuple(part.get_shape()), str(path))
    except (SafetensorError, OSError) as error:
        raise FileError(f"{path} is damaged: {error}; {_AGAIN}") from error
    return headers


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Return the headers of all tensors of the model in a folder, by its index where it has one."""
    main = _main_file(folder, INDEX_FILES)
    if main.suffix != ".json":
        return read_file_header(main)
    places = read_json(main).get("weight_map")
    if not isinstance(places, dict) or any(Path(str(n)).name != n for n in places.values()):
        fault = "it has no weight_map of tensors and of files beside it"
        raise FileError(f"{main} is damaged: {fault}; {_AGAIN}")
    files = {name: read_file_header(folder / name) for name in set(places.values())}
    for tensor, name in places.items():
        if tensor not in files[name]:
            fault = f"lacks the tensor {tensor} that the index expects there"
            raise FileError(f"{folder / name} {fault}; {_AGAIN}")
    return {tensor: files[name][tensor] for tensor, name in places.items()}


def _main_file(folder: Path, names: Sequence[str]) -> Path:
    """Return the first file of these names; an error says what to do with what is there."""
    for name in names:
        if os.path.lexists(folder / name):
            return folder / name
    present = sorted(path.name for path in folder.iterdir())
    remedy = f"{_AGAIN}, in safetensors"
    if "adapter_config.json" in present and names == INDEX_FILES:
        remedy = f"it is an adapter; write BASE+{folder}, with the model it was trained on"
    elif any(name.endswith(".bin") for name in present):
        remedy = _CONVERT
    raise FileError(
        f"{folder} holds no weights, no {' or '.join(reversed(names))} "
        f"(but: {', '.join(present[:5]) or 'nothing'}); {remedy}"
    )


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a model, in the order of their names."""
    return sorted({Path(header.file) for header in read_headers(folder).values()})


def check_model_folder(folder: Path) -> None:
    """Check config, weights and tokenizer of a model, by headers alone; nothing beside them."""
    from transformers import CONFIG_MAPPING

    if not read_headers(folder):
        raise FileError(f"{folder} holds no tensors; {_AGAIN}")
    path = folder / "config.json"
    content = read_json(path)
    kind = content.get("model_type", "")
    if "auto_map" not in content:  # else the model brings code of its own, which says what it is
        try:
            CONFIG_MAPPING[kind].from_json_file(path)  # it may hold {"__float__": "Infinity"}
        except Exception as error:  # of many kinds: dataclasses, lookups, arithmetic
            said = f"{path} is no config of `model_type`: {kind!r} that this version of"
            why = f"transformers reads: {str(error).strip()}; correct it, or update transformers"
            raise FileError(f"{said} {why}") from error
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.json"):
        if os.path.lexists(folder / name):
            read_json(folder / name)


def check_adapter_folder(folder: Path) -> Path:
    """Check config and weights of an adapter; return the file that holds the weights."""
    read_json(folder / "adapter_config.json")
    file = _main_file(folder, ("adapter_model.safetensors",))
    read_file_header(file)
    return file


def existing_folder(path: str) -> Path | None:
    """Return the folder that a config names; None for what can be a name on the Hub."""
    if Path(path).is_dir():
        return Path(path)
    try:
        validate_repo_id(path)
    except HFValidationError as error:
        where = "" if Path(path).is_absolute() else f" in {Path.cwd()}"
        said = f"there is no folder {path}{where}; correct the name (~ is not expanded)"
        raise FileError(said) from error
    return None


def _on_hub(part: ModelPath) -> dict[str, Any]:
    """Return what names a model to huggingface_hub, and the cache of `--transformers-cache`."""
    cache = LoaderCache().hf_cache_dir
    return {"repo_id": part.path, "revision": part.revision, "cache_dir": cache}


def hub_file(part: ModelPath, name: str) -> Path:
    """Return where a file of a model on the Hub is: in the cache, or once it is downloaded."""
    place = {**_on_hub(part), "filename": name}
    try:
        known = huggingface_hub.try_to_load_from_cache(**place)
        return Path(known if isinstance(known, str) else huggingface_hub.hf_hub_download(**place))
    except Exception as error:  # of many kinds: no such model, no access, no network
        raise unreachable(part, error) from error


def downloaded(part: ModelPath, patterns: Sequence[str]) -> Path:
    """Return the folder of a model, downloaded if it is none here; offline, from the cache."""
    if folder := existing_folder(part.path):
        return folder
    try:
        wanted = {**_on_hub(part), "allow_patterns": [*patterns]}
        return Path(huggingface_hub.snapshot_download(**wanted))
    except Exception as error:  # of many kinds: no such model, no access, no network
        raise unreachable(part, error) from error


def unreachable(part: ModelPath, error: Exception) -> FileError:
    """Return an error that says that a model is neither here nor on the Hub."""
    why = ": ".join((type(error).__name__, *str(error).splitlines()[:1]))
    return FileError(
        f"{part.path} is no folder in {Path.cwd()}, and no model of the Hub that can be read "
        f"({why}); correct the name, or download the model first"
    )


def check_reference(model: ModelReference) -> None:
    """Check the files of a model and of its adapter, where they are folders here."""
    if folder := existing_folder(model.model.path):
        check_model_folder(folder)
        names = read_json(folder / "config.json").get("architectures")
        known = isinstance(names, list) and len(names) == 1 and isinstance(names[0], str)
        if not known and model.override_architecture is None:
            said = f"{folder / 'config.json'} has `architectures`: {names!r} instead of a list of"
            raise FileError(f"{said} one name; correct it after the base model's")
    if model.lora and (folder := existing_folder(model.lora.path)):
        check_adapter_folder(folder)


def check_references(models: Sequence[ModelReference]) -> None:
    """Raise a `FileError` for the first that is damaged, or neither here nor on the Hub."""
    for model in models:
        check_reference(model)
        for part, name in ((model.model, "config.json"), (model.lora, "adapter_config.json")):
            if part is not None and not Path(part.path).is_dir():
                hub_file(part, name)


@dataclass(frozen=True)
class Checkpoint:
    """One model without its weights."""

    model: ModelReference  # the headers of an adapter's are those of its base
    headers: Mapping[str, TensorHeader]
    quantised: str = ""  # method of what is dequantised when read: headers are of the result

    @cached_property
    def config(self) -> dict[str, Any]:
        """`config.json`; empty where there is none."""
        return json_or_empty(find_model_file(self.model.model, "config.json"))

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
    check_reference(model)  # first: mergekit opens single files without saying which is damaged
    part, headers = model.model, None
    if folder := existing_folder(part.path):
        headers = read_headers(folder)
    else:
        with suppress(Exception):  # a snapshot in the cache may lack files
            here = huggingface_hub.snapshot_download(**_on_hub(part), local_files_only=True)
            headers = read_headers(Path(here))
    if headers is None:
        try:
            metadata = huggingface_hub.get_safetensors_metadata(part.path, revision=part.revision)
        except Exception as error:
            raise unreachable(part, error) from error
        headers = {
            name: TensorHeader(info.dtype, tuple(info.shape), file)
            for file, content in metadata.files_metadata.items()
            for name, info in content.tensors.items()
        }
    checkpoint = Checkpoint(model, headers)
    if found := find_quantisation(checkpoint.config, headers):
        return replace(checkpoint, headers=found.headers(headers), quantised=found.method)
    return checkpoint


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
            paths = {name: header.file for name, header in checkpoint.headers.items()}
            index = ShardedTensorIndex("", True, paths, [])
            LoaderCache().loaders[checkpoint.model] = LazyTensorLoader(index)
        yield


def config_donor(config: MergeConfiguration) -> ModelReference:
    """Return the model whose `config.json` the result has."""
    return config.base_model or config.referenced_models()[0]


def tokenizer_donor(config: MergeConfiguration) -> ModelReference:
    """Return the model whose tokens have the same numbers in the result."""
    source = config.tokenizer.source if config.tokenizer else config.tokenizer_source
    return source if isinstance(source, ModelReference) else config_donor(config)


def find_model_file(model: ModelPath, name: str, *, beside: Path = Path()) -> Path | None:
    """Return where a small file of a model lies; None where it has none, as far as can be known.

    Relative names are looked for in `beside`, too. Without a network, what the cache lacks is not
    there; a `FileError` says that the Hub refused to answer.
    """
    for folder in (Path(model.path).expanduser(), beside / model.path):
        if folder.is_dir():
            return folder / name if (folder / name).is_file() else None
    try:
        return hub_file(model, name)
    except FileError as error:
        cause: Any = error.__cause__
        refused = any(isinstance(one, hub.HfHubHTTPError) for one in (cause, cause.__cause__))
        if refused and not isinstance(cause, _ABSENT):  # it was asked too often, say
            raise
        return None


def add_model_files(
    config: MergeConfiguration, folder: Path, *, beside: Path = Path()
) -> dict[str, ModelReference]:
    """Copy what a result lacks of its models' files; return whose files were added, by name.

    Code is copied, not run. Nothing that is there is touched.
    """
    find = partial(find_model_file, beside=beside)
    present = {path.name for path in folder.iterdir()}
    missing = _missing_files(config, present, find)
    settings = folder / TOKENIZER_CONFIG
    own = json_or_empty(settings).get("chat_template") or config.chat_template
    if settings.is_file() and not own and present.isdisjoint(TEMPLATES):
        speaker = tokenizer_donor(config)
        templates = {name: find(speaker.model, name) for name in TEMPLATES}
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


def open_models(folders: Mapping[ModelReference, str]) -> None:
    """Let mergekit's cache read models, dequantised, from their folders if these exist.

    mergekit itself asks the Hub for every model, even offline, and may find another commit.
    """
    cache = LoaderCache()
    for model, folder in folders.items():
        if model not in cache.loaders:
            if not os.path.isdir(folder):  # as on another node of a cluster
                folder = str(downloaded(model.model, DOWNLOADED))
            cache.loaders[model] = LazyTensorLoader.from_disk(folder, cache.lazy_unpickle)
        loader = cache.get(model)
        config = json_or_empty(Path(loader.index.base_path, "config.json"))
        quantisation = find_quantisation(config, loader.index.tensor_paths)
        if quantisation and not isinstance(loader, DequantisingLoader):
            cache.loaders[model] = DequantisingLoader(loader, quantisation)
