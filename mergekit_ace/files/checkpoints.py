# SPDX-License-Identifier: Apache-2.0
"""The files that make a folder a model or an adapter, and what is wrong with them.

What lies beside them, such as an adapter or the state of an optimizer, is not looked at.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from mergekit_ace.files.headers import DamagedFileError, read_file_header, read_headers, read_json

if TYPE_CHECKING:
    from mergekit.common import ModelPath, ModelReference

# One of them is in the folder of every model: an index of its weights, or all of them. In the order
# in which mergekit looks for them.
INDEX_FILES = (
    "model.safetensors.index.json", "model.safetensors",
    "pytorch_model.bin.index.json", "pytorch_model.bin",
)  # fmt: skip
_ADAPTER_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin")
# Files that are read if they are there.
_OPTIONAL = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "vocab.json")
# Kinds of adapters in peft that add inputs or steps to a model, and so have nothing to merge.
_PROMPTS = (
    "PROMPT_TUNING", "MULTITASK_PROMPT_TUNING", "P_TUNING", "PREFIX_TUNING", "CPT",
    "ADAPTION_PROMPT",
)  # fmt: skip
PEFT_PREFIX = "base_model.model."  # of every tensor that PEFT writes and loads


def existing_folder(path: str) -> Path | None:
    """Return the folder that a config names; None for what can only be a name on the Hub.

    Args:
        path: of a model or adapter, as a config has it, without revision.

    Raises:
        DamagedFileError: it names no folder, and cannot be a name on the Hub.
    """
    folder = Path(path)
    if folder.is_dir():
        return folder
    if (
        os.path.lexists(folder)
        or folder.is_absolute()
        or path.startswith((".", "~"))
        or path.count("/") > 1
    ):
        where = "" if folder.is_absolute() else f" in {Path.cwd()}"
        raise DamagedFileError(
            f"there is no folder {path}{where}; correct the name, or the link (~ is not expanded)"
        )
    return None


def check_model_folder(folder: Path) -> None:
    """Check config, weights and tokenizer of a model, by headers alone.

    Raises:
        DamagedFileError: naming the first file that is damaged or missing.
    """
    main = _main_file(folder)
    if main.suffix == ".json":
        read_headers(_read_weight_map(main), str(folder))
    elif not read_file_header(main):
        raise DamagedFileError(f"{main} holds no tensors; download or save it again")
    _check_config(folder / "config.json")
    for name in _OPTIONAL:
        if os.path.lexists(folder / name):
            read_json(folder / name)


def check_adapter_folder(folder: Path) -> None:
    """Check config and weights of an adapter.

    Raises:
        DamagedFileError: naming the first file that is damaged or missing.
    """
    if not os.path.lexists(folder / "adapter_config.json"):
        raise DamagedFileError(
            f"{folder} holds no adapter_config.json; give the folder that peft's save_pretrained "
            "wrote"
        )
    kind = read_json(folder / "adapter_config.json").get("peft_type")
    if kind in _PROMPTS:
        raise DamagedFileError(
            f"{folder} is an adapter of the kind {kind}, which changes no weights of its base, so "
            "that it cannot be merged; leave it out"
        )
    read_file_header(*adapter_files(folder))


def weight_files(folder: Path) -> list[Path]:
    """Return the files that hold the weights of a model, in the order of their names.

    Raises:
        DamagedFileError: there are none, or their index is damaged.
    """
    main = _main_file(folder)
    if main.suffix != ".json":
        return [main]
    return sorted({folder / name for name in _read_weight_map(main).values()})


def adapter_files(folder: Path) -> list[Path]:
    """Return the file that holds the weights of an adapter, in a list.

    Raises:
        DamagedFileError: there is none.
    """
    for name in _ADAPTER_WEIGHTS:
        if os.path.lexists(folder / name):
            return [folder / name]
    raise DamagedFileError(
        f"{folder} holds no weights of an adapter; download it again, or save it by peft's "
        "save_pretrained"
    )


def _main_file(folder: Path) -> Path:
    """Return the index of a model's weights or, without one, the file that holds all of them."""
    for name in INDEX_FILES:
        if os.path.lexists(folder / name):
            return folder / name
    raise DamagedFileError(f"{folder} holds no weights: {_found_instead(folder)}")


def _found_instead(folder: Path) -> str:
    """Return what a folder without weights holds in their place, and what to do about it."""
    names = sorted(path.name for path in folder.iterdir())
    if "adapter_config.json" in names:
        return f"it is an adapter; write BASE+{folder}, with the model that it was trained on"
    shards = [name for name in names if "-of-" in name and name.endswith((".safetensors", ".bin"))]
    if shards:
        return f"there is no index beside {shards[0]}; download model.safetensors.index.json too"
    others = [name for name in names if name.endswith((".safetensors", ".gguf", ".bin", ".pth"))]
    if others:
        return f"{others[0]} is none that mergekit reads; get or save the model in safetensors"
    return "there is no model.safetensors; download or save the checkpoint again"


def _read_weight_map(index: Path) -> dict[str, str]:
    """Return file name by tensor name from an index.

    Raises:
        DamagedFileError: it is no index, or names files outside of its folder.
    """
    places = read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        raise DamagedFileError(
            f"{index} is damaged: it has no weight_map of tensors and files; download or save it "
            "again"
        )
    for tensor, name in places.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise DamagedFileError(
                f"{index} is damaged: its weight_map has {name!r} for {tensor} instead of the name "
                "of a file beside it; download or save it again"
            )
    return places


def _check_config(path: Path) -> None:
    """Raise unless a config names a kind of model, and has the types of that kind."""
    from transformers import CONFIG_MAPPING

    content = read_json(path)
    kind = content.get("model_type")
    if not isinstance(kind, str) or not kind:
        raise DamagedFileError(
            f"{path} has no `model_type`, which tells what kind of model this is; download or save "
            "the checkpoint again"
        )
    if "auto_map" in content:  # the model brings code of its own, which says what it is
        return
    if kind not in CONFIG_MAPPING:
        raise DamagedFileError(
            f"{path} has `model_type`: {kind!r}, which this version of transformers does not know; "
            "correct it, or update transformers"
        )
    try:
        CONFIG_MAPPING[kind].from_json_file(path)  # which may hold {"__float__": "Infinity"}
    except Exception as error:  # of many kinds: dataclasses, lookups, arithmetic
        last = str(error).strip().rpartition("\n")[2].strip() or type(error).__name__
        wrong = last.removeprefix("TypeError: ")
        raise DamagedFileError(f"{path} is not a config of {kind}: {wrong}; correct it") from error


def check_name(model: ModelReference) -> None:
    """Raise a `DamagedFileError` for a folder that mergekit takes for something else."""
    if (model.lora or model.model.revision) and Path(str(model)).exists():
        raise DamagedFileError(
            f"the folder {model} cannot be named in a config, where + begins an adapter and @ a "
            "revision; rename it"
        )


def check_reference(model: ModelReference) -> None:
    """Check the files of a model and of its adapter, where they are folders here.

    Raises:
        DamagedFileError: naming the file, or the folder that is not there.
    """
    check_name(model)
    folder = existing_folder(model.model.path)
    if folder is not None:
        check_model_folder(folder)
    if folder is not None and model.override_architecture is None:
        names = read_json(folder / "config.json").get("architectures")
        if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
            raise DamagedFileError(
                f"{folder / 'config.json'} has `architectures`: {names!r} instead of a list of "
                "one name, by which mergekit knows the model; correct it after the base model's"
            )
    folder = existing_folder(model.lora.path) if model.lora else None
    if folder is not None:
        check_adapter_folder(folder)


def hub_file(part: ModelPath, name: str, *, cached: bool = False) -> str:
    """Return where a file of a model on the Hub is, once it is downloaded.

    Args:
        cached: whether one in the cache will do, though the Hub may have a newer one.

    Raises:
        DamagedFileError: it is not to be had.
    """
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    try:
        known = try_to_load_from_cache(part.path, name, revision=part.revision)
        if cached and isinstance(known, str):
            return known
        return hf_hub_download(part.path, name, revision=part.revision)
    except Exception as error:  # of many kinds: no such model, no access, no network
        raise DamagedFileError(
            f"{part.path} is no folder in {Path.cwd()}, and no model of the Hub that can be read "
            f"({type(error).__name__}); correct the name, or download the model first"
        ) from error


def find_on_hub(model: ModelReference) -> None:
    """Raise a `DamagedFileError` unless what is no folder here is in the Hub's cache, or there."""
    for part, name in ((model.model, "config.json"), (model.lora, "adapter_config.json")):
        if part is not None and not Path(part.path).is_dir():
            hub_file(part, name, cached=True)
