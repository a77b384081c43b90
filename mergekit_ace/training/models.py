# SPDX-License-Identifier: Apache-2.0
"""Models: found, loaded, mapped from disk, and which of their parameters are merged."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers
from accelerate import init_empty_weights
from mergekit.common import ModelReference
from safetensors.torch import load_file
from torch import Tensor, nn

from mergekit_ace.adapters.read import read_adapters
from mergekit_ace.check.check import DEQUANTISE
from mergekit_ace.check.loading import quiet_transformers
from mergekit_ace.files import checkpoints as files
from mergekit_ace.files.checkpoints import VOCABULARY_FILES
from mergekit_ace.files.saving import file_states, replacing, save_tensors
from mergekit_ace.methods.storage import loaded_names
from mergekit_ace.naming import ConfigError, is_counter, is_running_statistic
from mergekit_ace.training import tasks
from mergekit_ace.training.config import TrainConfig
from mergekit_ace.training.state import TrainingRun, explained_damage

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

Weights = Mapping[str, Tensor]  # mapped from disk, by names in memory


@dataclass(frozen=True)
class Models:
    """The models of a run by their folders, with their tokenizer or image processor (or None)."""

    config: TrainConfig
    run: TrainingRun
    base: str
    experts: tuple[str, ...]
    processor: Any
    kind: tasks.ModelKind

    @property
    def backbones(self) -> list[Path]:
        """Folders for classifiers without heads, the base's first."""
        names = ["base", *(f"expert-{row}" for row in range(len(self.experts)))]
        return [self.run.path / "backbones" / name for name in names]

    def load(self, folder: str, dtype: torch.dtype | str = "auto") -> PreTrainedModel:
        """Load one of them, see `load_model`; the base may lack the head of a classifier."""
        new_head = self.kind.has_heads and folder == self.base
        return load_model(folder, self.kind, self.config, dtype, new_head=new_head)

    def merged_names(self, model: PreTrainedModel) -> list[str]:
        """Return the names in memory of the parameters that are merged: no heads, no excluded."""
        heads, exclude = tasks.head_prefixes(model, self.kind), self.config.exclude
        parameters = model.named_parameters()
        known = [n for n, p in parameters if p.is_floating_point() and not n.startswith(heads)]
        for part in exclude:
            if not any(part in name for name in known):
                said = f"exclude: {part!r} is part of no name of a parameter, such as {known[0]}"
                raise ConfigError(said)
        return [name for name in known if not any(part in name for part in exclude)]

    def check_experts(self) -> None:
        """Raise unless experts have the base's parameters, but for their heads, in their shapes."""
        base = load_skeleton(self.base, self.kind, self.config)
        self.merged_names(base)  # says what is wrong with `exclude`
        expected = self._shapes(base)
        for member, folder in zip(self.config.models, self.experts, strict=True):
            expert = load_skeleton(folder, self.kind, self.config)
            own = self._shapes(expert)
            for name in (*own, *expected):
                one, other = own.get(name, "missing"), expected.get(name, "missing")
                if one != other:
                    said = f"expert {member.model} was not fine-tuned from {self.config.base_model}"
                    raise ConfigError(f"{said}: they differ in {name}, {one} against {other}")
            if self.kind.has_heads:
                check_classes(expert.config, f"expert {member.model}")

    def _shapes(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return what experts have in common with the base: shapes, and tied embeddings."""
        heads, tied = tasks.head_prefixes(model, self.kind), "tie_word_embeddings"
        parameters = model.named_parameters(remove_duplicate=False)
        shapes: dict[str, Any] = {name: tuple(one.shape) for name, one in parameters}
        if not heads:
            shapes[tied] = getattr(model.config.get_text_config(), tied, False)
        names = (name for name in shapes if not name.startswith(heads))
        return {n: shapes[n] for n in names if not any(part in n for part in self.config.exclude)}


def claim_models(config: TrainConfig, run: TrainingRun, *, overwrite: bool) -> Models:
    """Find all models before anything is computed, and make the folder of the run theirs."""
    kind = tasks.MODEL_KINDS[config.task]
    references = (config.base_model, *(expert.model for expert in config.models))
    with run.accelerator.main_process_first():  # it downloads, and merges adapters
        adapters, trust = run.path / "adapters", config.trust_remote_code
        folders = [local_folder(reference, adapters, trust) for reference in references]
    known: dict[str, str] = {}
    for reference, folder in zip(references, folders, strict=True):
        if files.read_json(Path(folder) / "config.json").get("quantization_config"):
            raise ConfigError(f"model {reference} is quantised, not to be merged; {DEQUANTISE}")
        place = os.path.realpath(folder)
        if place in known:
            said = f"{reference} and {known[place]} are the same model"
            raise ConfigError(f"{said}; list every model once")
        known[place] = reference
    processor = load_processor(folders, kind, config)
    run.claim(config, [*folders, *(data.path for _, data in config.sources)], overwrite=overwrite)
    return Models(config, run, folders[0], tuple(folders[1:]), processor, kind)


def local_folder(reference: str | ModelReference, adapters: Path, trust_remote_code: bool) -> str:
    """Return the folder of a model: itself, downloaded, or with its adapter in `adapters`."""
    parsed = ModelReference.model_validate(reference)
    files.check_references([parsed])
    if parsed.lora:
        folder = _with_adapter(parsed, adapters, trust_remote_code)
    else:
        folder = str(files.downloaded(parsed.model, files.DOWNLOADED))
    files.check_model_folder(Path(folder))  # what was downloaded, too
    return folder


def model_paths(references: Iterable[str | ModelReference]) -> list[str]:
    """Return the paths, or names on the Hub, of models and of their adapters."""
    parsed = map(ModelReference.model_validate, references)
    return [part.path for one in parsed for part in (one.model, one.lora) if part is not None]


def _with_adapter(reference: ModelReference, adapters: Path, trust_remote_code: bool) -> str:
    """Merge an adapter into its model; the folder appears only when it is complete."""
    identity = json.dumps([str(reference), file_states(model_paths([reference]))])
    folder = adapters / hashlib.sha256(identity.encode()).hexdigest()[:16]
    if not folder.exists():
        with suppress(ConfigError):  # PEFT's merge does what the reader does not
            read_adapters([reference])[reference].check_ties()
        with replacing(folder) as partial:
            reference.merged(str(partial), trust_remote_code, "float32")
    return str(next(folder.iterdir()))  # mergekit's cache of one model


def load_model(
    folder: str, kind: tasks.ModelKind, config: Any, dtype: torch.dtype | str = "auto", *,
    new_head: bool = False, **options: Any,
) -> PreTrainedModel:  # fmt: skip
    """Load a model for inference; by default in the dtype that it is stored in.

    A `new_head` lets a classifier lack its head, or have one of another shape. All else that the
    checkpoint lacks, which transformers would draw at random, is a `ConfigError`.
    """
    new_head = new_head or isinstance(kind, tasks.ZeroShotImageClassification)  # the base lends one
    with quiet_transformers():
        try:
            model, info = getattr(transformers, kind.auto_class).from_pretrained(
                folder, dtype=dtype, trust_remote_code=config.trust_remote_code,
                local_files_only=True, output_loading_info=True,
                ignore_mismatched_sizes=new_head, **options,
            )  # fmt: skip
        except torch.OutOfMemoryError:
            raise
        except (OSError, ValueError, RuntimeError, ImportError) as error:
            said = f"model {folder} cannot be loaded for task: {config.task}: {error}"
            raise ConfigError(said) from error
    heads = tasks.head_prefixes(model, kind) if new_head else ()
    lost = [*info["missing_keys"], *(name for name, *_ in info["mismatched_keys"])]
    if lost := sorted(name for name in lost if not name.startswith(heads)):
        said = f"model {folder} lacks {len(lost)} parameters that task: {config.task} needs"
        raise ConfigError(f"{said}, such as {lost[0]}; save it again, with its head")
    return model.eval().requires_grad_(False)


def load_skeleton(folder: str, kind: tasks.ModelKind, config: Any) -> PreTrainedModel:
    """Build the architecture of a model without its weights: names and shapes, no memory."""
    model_class = getattr(transformers, kind.auto_class)
    trust = config.trust_remote_code
    with quiet_transformers(), init_empty_weights():
        # Of a tower, a whole CLIP may be stored, whose config has that of the tower in it.
        config_class = getattr(model_class, "config_class", transformers.AutoConfig)
        settings = config_class.from_pretrained(folder, trust_remote_code=trust)
        if config_class is transformers.AutoConfig:
            return model_class.from_config(settings, trust_remote_code=trust)
        return model_class(settings)


def load_processor(
    folders: list[str], kind: tasks.ModelKind, config: Any, *, grown: bool = False
) -> Any:
    """Load the tokenizer that all folders share, with the first chat template of any of them.

    With `grown`, other tokenizers may have more tokens; the templates of these do not count.
    For images it is the image processor of the first folder that has one, or None.
    """
    images = isinstance(kind, tasks.ImageClassification)
    names = ("preprocessor_config.json",) if images else VOCABULARY_FILES
    found = [one for one in folders if any(Path(one, name).is_file() for name in names)]
    if images:
        return transformers.AutoImageProcessor.from_pretrained(found[0]) if found else None
    trust, load = config.trust_remote_code, transformers.AutoTokenizer.from_pretrained
    found = found or folders[:1]  # transformers says that it has none
    loaded = [(load(folder, trust_remote_code=trust), folder) for folder in found]
    (tokenizer, first), *others = sorted(loaded, key=lambda one: len(one[0]))
    for other, folder in others:
        own, shared = other.get_vocab(), tokenizer.get_vocab()
        if not (shared.items() <= own.items() if grown else shared == own):
            said = f"the tokenizer of {folder} is not that of {first}; align them first"
            raise ConfigError(f"{said}, e.g. by mergekit's `tokenizer:` section")
        if shared == own and not getattr(tokenizer, "chat_template", None):
            tokenizer.chat_template = getattr(other, "chat_template", None)
    return tokenizer


def check_classes(config: PreTrainedConfig, reference: str) -> None:
    """Raise a `ConfigError` unless a classifier answers with one class of several."""
    kind, several = getattr(config, "problem_type", None), (config.num_labels or 0) > 1
    if not several or kind not in (None, "single_label_classification"):
        what = f"problem_type: {kind}" if several else "one output (a regression)"
        raise ConfigError(f"{reference} has {what}, and does not choose one class: leave it out")


def map_file(path: str | os.PathLike) -> dict[str, Tensor]:
    """Map all tensors of a file: read when used, in the system's cache, not in our memory."""
    with explained_damage(path):
        return load_file(path)


def map_folder(folder: str | os.PathLike) -> dict[str, Tensor]:
    """Map all tensors of a checkpoint."""
    mapped = map(map_file, files.weight_files(Path(folder)))
    return {name: tensor for tensors in mapped for name, tensor in tensors.items()}


def map_weights(
    model: PreTrainedModel, names: Iterable[str], folder: str | os.PathLike, copy: Path
) -> dict[str, Tensor]:
    """Map parameters of a model from the files it was loaded from, or from a converted copy.

    The files are used only if every parameter is in them, equal to the one in memory.
    """
    parameters = {name: model.get_parameter(name).detach() for name in names}
    stored, mapped = map_folder(folder), {}
    for name, own in stored_names(model, parameters, stored).items():
        for tensor in (stored[one] for one in own):
            if not tensor.is_floating_point():
                said = f"tensor {name} of model {folder} is stored as {tensor.dtype}"
                raise ConfigError(f"{said}; get the model in bfloat16, float16 or float32")
            if torch.equal(tensor, parameters[name].cpu().to(tensor.dtype)):
                mapped[name] = tensor
        if name not in mapped:
            break
    if len(mapped) == len(parameters):
        return mapped
    if not copy.exists():
        save_tensors(copy, {name: p.cpu().contiguous() for name, p in parameters.items()})
    return map_file(copy)


def stored_names(
    model: PreTrainedModel, names: Iterable[str], stored: Mapping[str, object]
) -> dict[str, tuple[str, ...]]:
    """Find the names under which a checkpoint on disk holds parameters in memory."""
    found: dict[str, set[str]] = {name: set() for name in names}
    known = {id(model.get_parameter(name)): name for name in found}
    # Tied parameters have several names and are one: all of them lead to it.
    aliases = dict(model.named_parameters(remove_duplicate=False))
    for own, targets, _ in loaded_names(model, stored):
        for target in targets & aliases.keys():
            if name := known.get(id(aliases[target])):
                found[name].add(own)
    return {name: tuple(sorted(own)) for name, own in found.items()}


def save_backbone(model: PreTrainedModel, folder: Path) -> None:
    """Save a classifier without its head, under the names it has in memory, once.

    mergekit merges checkpoints of one architecture with the same tensors, which classifiers with
    heads of their own are not. Of some architectures it overlooks the names on disk.
    """
    if not folder.exists():
        backbone: Any = model.base_model
        with replacing(folder) as partial:
            backbone.save_pretrained(partial, save_original_format=False)


def average_statistics(model: nn.Module, experts: Sequence[Mapping[str, Tensor]]) -> None:
    """Give a model the mean of the experts' BatchNorm statistics, as `ace` merges them."""
    for name, buffer in model.named_buffers():
        if is_running_statistic(name):
            buffer.copy_(torch.stack([expert[name].float() for expert in experts]).mean(0))


def write_statistics_of_batches(model: nn.Module, folders: Sequence[Path]) -> None:
    """Give checkpoints the BatchNorm statistics and counters of a model, which all merges keep."""
    buffers = model.named_buffers()
    known = {name: b for name, b in buffers if is_running_statistic(name) or is_counter(name)}
    for path in (path for folder in folders if known for path in files.weight_files(folder)):
        tensors = map_file(path)
        tensors |= {n: known[n].to("cpu", t.dtype) for n, t in tensors.items() if n in known}
        save_tensors(path, tensors, {"format": "pt"})
