# SPDX-License-Identifier: Apache-2.0
"""Models: found, loaded, and which of their parameters are merged."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
import transformers
from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from mergekit.common import ModelReference
from torch import Tensor, nn

from mergekit_ace.adapters.read import OtherAdapterError, read_adapters
from mergekit_ace.check.loading import quiet_transformers
from mergekit_ace.check.models import DEQUANTISE
from mergekit_ace.files.checkpoints import (
    check_model_folder,
    check_reference,
    find_on_hub,
    weight_files,
)
from mergekit_ace.files.headers import read_json
from mergekit_ace.files.saving import file_states
from mergekit_ace.naming import is_counter, is_running_statistic
from mergekit_ace.planning import ConfigError
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.mapped_weights import rewrite_tensors
from mergekit_ace.training.state import TrainingError, TrainingRun
from mergekit_ace.training.tasks import (
    ImageClassification,
    ModelKind,
    ZeroShotImageClassification,
    head_names,
    model_kind,
)

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


SAME_MODEL = (
    "%s and %s are the same model as far as it is merged; list the base and every expert once, "
    "with all of its data"
)


class LoadingSettings(Protocol):
    """What the settings of every command have."""

    task: str
    trust_remote_code: bool


# Files that are downloaded of a model on the Hub.
_NEEDED = ["*.json", "*.safetensors", "*.model", "*.txt", "*.py", "*.jinja"]


@dataclass(frozen=True)
class ModelFolders:
    """Folders of all models, and what the models have in common.

    Attributes:
        processor: tokenizer, or image processor (or None).
    """

    base: str
    experts: tuple[str, ...]
    processor: Any
    kind: ModelKind

    @classmethod
    def find(cls, config: TrainConfig, run: TrainingRun) -> ModelFolders:
        """Find all models before anything is computed.

        Raises:
            TrainingError: one cannot be found or is quantised, or they have different tokenizers.
        """
        kind = model_kind(config.task)
        references = (config.base_model, *(expert.model for expert in config.models))
        # The first process downloads, and merges adapters.
        with run.accelerator.main_process_first():
            folders = [
                local_folder(reference, run.path / "adapters", config.trust_remote_code)
                for reference in references
            ]
        places = [os.path.realpath(folder) for folder in folders]
        for number, (reference, place) in enumerate(zip(references, places, strict=True)):
            if read_json(Path(place) / "config.json").get("quantization_config"):
                raise TrainingError(
                    f"model {reference} is quantised, so it cannot be merged; {DEQUANTISE}"
                )
            if place in places[:number]:
                raise TrainingError(SAME_MODEL % (reference, references[places.index(place)]))
        processor = load_processor(folders, kind, config)
        return cls(folders[0], tuple(folders[1:]), processor, kind)


def local_folder(reference: str, adapters: Path, trust_remote_code: bool) -> str:
    """Return the folder of a model: itself, downloaded from the Hub, or with its adapter merged in.

    Args:
        reference: mergekit's: folder or Hub name, `@revision`, `+adapter`.
        adapters: where a model with its adapter is kept once merged.

    Raises:
        DamagedFileError: there is no such model, or a file of it is damaged or missing.
        TrainingError: it has no safetensors files.
    """
    parsed = ModelReference.model_validate(reference)
    check_reference(parsed)
    find_on_hub(parsed)
    folder, revision = parsed.model.path, parsed.model.revision
    if parsed.lora:
        folder = _with_adapter(parsed, adapters, trust_remote_code)
    if not os.path.exists(folder):
        folder = snapshot_download(folder, revision=revision, allow_patterns=_NEEDED)
    check_model_folder(Path(folder))  # what was downloaded, too
    if weight_files(Path(folder))[0].suffix != ".safetensors":
        raise TrainingError(
            f"model {reference} has no safetensors files; load it with transformers and save it "
            "again by save_pretrained, which writes them"
        )
    return folder


def _with_adapter(reference: ModelReference, adapters: Path, trust_remote_code: bool) -> str:
    """Merge an adapter into its model; the folder appears only when it is complete.

    Raises:
        DamagedFileError: what is wrong with the adapter.
    """
    parts = [reference.model.path, reference.lora.path]
    identity = json.dumps([str(reference), file_states(parts)])
    name = hashlib.sha256(identity.encode()).hexdigest()[:16]
    if not (adapters / name).exists():
        partial = adapters / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        with suppress(OtherAdapterError, ConfigError):  # PEFT's merge does what the reader does not
            read_adapters([reference])[reference].check_ties()
        whole = reference.merged(str(partial), trust_remote_code, "float32")
        os.replace(whole.model.path, adapters / name)
    return str(adapters / name)


def load_model(
    folder: str,
    kind: ModelKind,
    config: LoadingSettings,
    dtype: torch.dtype | str = "auto",
    *,
    whole: bool = False,
    new_head: bool = False,
    **options: Any,
) -> PreTrainedModel:
    """Load a model for inference.

    Args:
        dtype: of its parameters; as they are stored by default.
        whole: refuse a checkpoint that lacks parameters, which transformers draws at random.
        new_head: let the head of a classifier be one of these, or of another shape.

    Raises:
        TrainingError: transformers cannot load it for the task, or it is not whole, or a tensor has
            another shape than its config asks for.
    """
    auto_class = getattr(transformers, kind.auto_class)
    with quiet_transformers():
        try:
            model, info = auto_class.from_pretrained(
                folder,
                dtype=dtype,
                trust_remote_code=config.trust_remote_code,
                local_files_only=True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,  # they are named below
                **options,
            )
        except torch.OutOfMemoryError:
            raise
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            raise TrainingError(
                f"model {folder} cannot be loaded for task: {config.task}: {error}"
            ) from error
    lent = isinstance(kind, ZeroShotImageClassification)  # by the base
    heads = tuple(f"{name}." for name in head_names(model, kind)) if lent or new_head else ()
    for name, found, expected in sorted(info["mismatched_keys"]):
        if new_head and name.startswith(heads):
            continue
        raise TrainingError(
            f"tensor {name} of model {folder} has shape {tuple(found)}, but its config.json asks "
            f"for {tuple(expected)}; get the model again, or correct the config"
        )
    lost = [n for n in sorted(info["missing_keys"]) if whole and not n.startswith(heads)]
    if lost:
        raise TrainingError(
            f"model {folder} lacks {len(lost)} parameters that task: {config.task} needs, such as "
            f"{lost[0]}; save it again by save_pretrained, with its head"
        )
    return model.eval().requires_grad_(False)


def load_skeleton(folder: str, kind: ModelKind, config: LoadingSettings) -> PreTrainedModel:
    """Build the architecture of a model without its weights: names and shapes, no memory."""
    model_class = getattr(transformers, kind.auto_class)
    with quiet_transformers(), init_empty_weights():
        # Of a tower, a whole CLIP may be stored, whose config has that of the tower in it.
        config_class = getattr(model_class, "config_class", transformers.AutoConfig)
        trust = config.trust_remote_code
        settings = config_class.from_pretrained(folder, trust_remote_code=trust)
        if config_class is transformers.AutoConfig:
            return model_class.from_config(settings, trust_remote_code=trust)
        return model_class(settings)


def load_processor(folders: list[str], kind: ModelKind, config: LoadingSettings) -> Any:
    """Load the tokenizer of the first folder that has one, which all others must share.

    If it lacks a chat template, as that of a base often does, it gets the first one of the others.
    For images it is the image processor of the first folder that has one, or None.

    Raises:
        TrainingError: there is no tokenizer, or there are different ones.
    """

    def having(*files: str) -> list[str]:
        return [f for f in folders if any(os.path.isfile(os.path.join(f, n)) for n in files)]

    if isinstance(kind, ImageClassification):
        found = having("preprocessor_config.json")
        return transformers.AutoImageProcessor.from_pretrained(found[0]) if found else None
    found = having("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.txt")
    if not found:
        raise TrainingError(f"neither the base model {folders[0]} nor an expert has a tokenizer")
    trust = config.trust_remote_code
    tokenizer, *others = (
        transformers.AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
        for folder in found
    )
    for folder, other in zip(found[1:], others, strict=True):
        if other.get_vocab() != tokenizer.get_vocab():
            raise TrainingError(
                f"the tokenizer of {folder} is not that of {found[0]}; experts of one merge need "
                "one tokenizer (align them first, e.g. by mergekit's `tokenizer:` section)"
            )
        if not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = getattr(other, "chat_template", None)
    return tokenizer


def merged_parameters(
    model: PreTrainedModel, kind: ModelKind, exclude: tuple[str, ...]
) -> list[str]:
    """Return the names in memory of the parameters that are merged: no heads, nothing excluded."""
    heads = tuple(f"{head}." for head in head_names(model, kind))
    known = [
        name
        for name, parameter in model.named_parameters()
        if parameter.is_floating_point() and not name.startswith(heads)
    ]
    for part in exclude:
        if not any(part in name for name in known):
            raise TrainingError(
                f"exclude: {part!r} is part of no name of a parameter that is merged; there are, "
                f"for example, {', '.join(known[:3])}"
            )
    names = [name for name in known if not any(part in name for part in exclude)]
    if not names:
        raise TrainingError(f"`exclude` leaves nothing to merge: {', '.join(exclude)}")
    return names


def check_expert(
    expert: PreTrainedModel,
    base: PreTrainedModel,
    names: list[str],
    kind: ModelKind,
    reference: str,
) -> None:
    """Raise unless the expert has the base's parameters but for its head, with their shapes."""
    heads = tuple(f"{head}." for head in head_names(expert, kind))
    expected = {n: tuple(p.shape) for n, p in base.named_parameters(remove_duplicate=False)}
    shapes = {n: tuple(p.shape) for n, p in expert.named_parameters() if not n.startswith(heads)}
    tied, own = (
        getattr(model.config.get_text_config(), "tie_word_embeddings", False)
        for model in (base, expert)
    )
    more = [name for name in shapes if name not in expected]
    wrong = next((name for name in names if shapes.get(name) != expected[name]), None)
    if tied != own and not kind.has_heads:
        what = f"has tie_word_embeddings: {own} in its config, and the base model {tied}"
    elif more:
        what = f"has {len(more)} parameters that the base model lacks, such as {more[0]}"
    elif wrong in shapes:
        what = f"has {wrong} of shape {shapes[wrong]}, which is {expected[wrong]} in the base model"
    elif wrong is not None:
        what = f"has no parameter {wrong}"
    else:
        return
    raise TrainingError(
        f"expert {reference} {what}; experts must be fine-tuned from the base model, and saved as "
        "it is"
    )


def check_classes(config: PreTrainedConfig, reference: str, *, regression: bool = False) -> None:
    """Raise a `TrainingError` unless a classifier answers with one class of several.

    Args:
        regression: one with a single number as its answer will do, too.
    """
    kind, several = getattr(config, "problem_type", None), config.num_labels > 1
    allowed = several or regression
    if allowed and kind in (None, "single_label_classification" if several else "regression"):
        return
    what = f"problem_type: {kind}" if several else "a single output (a regression)"
    known = "a number, or one class of several" if regression else "one class of several"
    raise TrainingError(
        f"{reference} has {what}; the trainer knows only classifiers that give every sample "
        f"{known}: leave it out, or merge it without data"
    )


def save_backbone(model: PreTrainedModel, folder: Path, run: TrainingRun) -> None:
    """Save a classifier without its head, under the names it has in memory; once, by one process.

    mergekit merges checkpoints of one architecture with the same tensors. Classifiers with heads of
    their own are not that, and of some architectures it overlooks the names on disk; backbones
    under these names are.
    """
    if folder.exists() or not run.is_main:
        return
    partial = folder.with_name(folder.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    backbone = model.base_model
    architectures = backbone.config.architectures
    backbone.save_pretrained(partial, save_original_format=False)
    backbone.config.architectures = architectures
    os.replace(partial, folder)


def average_statistics(model: nn.Module, experts: Sequence[Mapping[str, Tensor]]) -> None:
    """Give a model the mean of the experts' BatchNorm statistics, as `ace` merges them.

    They do not depend on coefficients. To measure them anew for every merge would cost a pass over
    the data, and coefficients learned with such statistics are worse.

    Args:
        experts: their buffers by name.
    """
    for name, buffer in model.named_buffers():
        if is_running_statistic(name):
            buffer.copy_(torch.stack([expert[name].float() for expert in experts]).mean(0))


def write_statistics_of_batches(model: nn.Module, folders: Iterable[Path]) -> None:
    """Give checkpoints the statistics and counters of a model in memory.

    What all of them have in common is in every merge of them, by whatever method.

    Args:
        model: whose tensors have the names in the checkpoints.
    """
    buffers = model.named_buffers()
    known = {name: b for name, b in buffers if is_running_statistic(name) or is_counter(name)}
    for path in (path for folder in folders if known for path in weight_files(folder)):
        rewrite_tensors(path, path, known.get)
