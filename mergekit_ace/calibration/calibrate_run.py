# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace calibrate`: samples are read, layers calibrated, and a checkpoint is written."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from mergekit.common import ModelReference
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.adapters.adapter_plan import base_of, with_base
from mergekit_ace.adapters.adapter_tasks import AdaptedWeights
from mergekit_ace.adapters.peft_adapter import adapter_folder
from mergekit_ace.calibration.calibrate_config import CalibrateConfig
from mergekit_ace.calibration.calibration_card import card_section
from mergekit_ace.calibration.layerwise import STEP, Calibration, SampleTeacher, Weights
from mergekit_ace.calibration.samples import (
    calibration_batches,
    comparison_batches,
    read_samples,
)
from mergekit_ace.calibration.scaling import (
    ChosenScale,
    ScaleSearch,
    WeightsBetween,
)
from mergekit_ace.checkpoint_files import weight_files
from mergekit_ace.files import save_tensors
from mergekit_ace.headers import DamagedFileError
from mergekit_ace.merging.manifest import MANIFEST_FILE
from mergekit_ace.training.language import CausalLanguageModel
from mergekit_ace.training.limits import fit_to_model
from mergekit_ace.training.mapped_weights import map_tensors, stored_tensors
from mergekit_ace.training.models import load_processor, load_skeleton, local_folder
from mergekit_ace.training.state import TrainingError, open_tensors

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def run_calibration(
    config: CalibrateConfig, out: Path, *, overwrite: bool = False, quiet: bool = False
) -> Path:
    """Calibrate a merge; the checkpoint in `out` has the files of the merge.

    Raises:
        TrainingError: something about the config, the models or the data is wrong.
        UnknownLayersError: the models are not of Llama's kind.
    """
    if out.exists() and any(out.iterdir()) and not overwrite:
        raise TrainingError(f"{out} is not empty; give another folder, or --overwrite")
    work = out.with_name(out.name + ".partial")
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir(parents=True)
    try:
        start, calibration, chosen = _prepare(config, out, work, quiet)
        if chosen is not None and not quiet:
            print(chosen)
        depth = len(calibration.model.model.layers)
        new: dict[str, Path] = {}
        bar = tqdm(calibration.layers(), "calibrating layers", depth, disable=quiet)
        for place, tensors in enumerate(bar):
            path = work / f"layer-{place}.safetensors"
            save_tensors(path, tensors)
            new |= dict.fromkeys(tensors, path)
        write_checkpoint(start, work / "result", _part_of_the_way(new))
        with open(work / "result" / "README.md", "a", encoding="utf-8") as card:
            names = [expert.task for expert in config.models]
            card.write(f"\n\n{card_section(names, calibration.teachers, chosen)}\n")
        shutil.rmtree(out, ignore_errors=True)
        os.replace(work / "result", out)
    finally:
        shutil.rmtree(work)
    return out


def _prepare(
    config: CalibrateConfig, out: Path, work: Path, quiet: bool
) -> tuple[Path, Calibration, ChosenScale | None]:
    """Find and check the models, read the texts, choose λ; return the folder to start from, too."""
    trust, adapters = config.trust_remote_code, work / "adapters"
    found = [_find_expert(one.model, adapters, trust) for one in config.models]
    experts = [expert for expert, _ in found]
    folders = [local_folder(config.merged_model, adapters, trust), *(place for _, place in found)]
    base = config.base_model and local_folder(config.base_model, adapters, trust)
    read = [
        *folders,
        *filter(None, [base]),
        *(adapter_folder(one.lora) for one in experts if one.lora),
    ]
    if any(os.path.realpath(out) == os.path.realpath(folder) for folder in read):
        raise TrainingError(f"{out} is one of the models that are read; give another folder")
    model = load_skeleton(folders[0], CausalLanguageModel(), config)
    start, *weights = (map_tensors(stored_tensors(folder)) for folder in folders)
    references = [config.merged_model, *(str(base_of(one)) for one in experts)]
    for reference, tensors in zip(references, (start, *weights), strict=True):
        _check_weights(reference, tensors, start, model)
    for place, expert in enumerate(experts):
        if expert.lora:
            weights[place] = AdaptedWeights(expert, weights[place])
    tokenizer = load_processor(folders, CausalLanguageModel(), config)
    samples = [read_samples(fit_to_model(data, model), tokenizer) for _, data in config.sources]
    _check_window(model, max(len(own[0]["input_ids"]) for own in samples))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder, chosen = Path(folders[0]), None
    if base:
        origin = map_tensors(stored_tensors(base))
        _check_weights(str(config.base_model), origin, start, model)
        texts = [comparison_batches(own) for own in samples[:-1]]
        pairs = list(zip(weights, texts, strict=True))
        with tqdm(desc="choosing λ", unit=" readings", disable=quiet) as bar:
            chosen = ScaleSearch(model, origin, start, pairs, device, bar.update).choose()
        folder, start = _scale(folder, origin, start, chosen.scale, work / "scaled")
    shares = (*[1 / len(experts)] * len(experts), 1.0)
    teachers = [
        SampleTeacher(tensors, calibration_batches(own), share)
        for tensors, own, share in zip((*weights, start), samples, shares, strict=True)
    ]
    return folder, Calibration(model, start, teachers, device), chosen


def _scale(
    folder: Path, base: Weights, merged: Weights, scale: float, target: Path
) -> tuple[Path, Weights]:
    """Write the merge with another λ; return its folder and weights."""
    scaled = WeightsBetween(base, merged, scale)
    write_checkpoint(folder, target, lambda name, tensor: scaled[name].to(tensor.dtype))
    return target, map_tensors(stored_tensors(target))


def _find_expert(reference: str, adapters: Path, trust: bool) -> tuple[ModelReference, str]:
    """Return an expert and the folder of its weights; `BASE+ADAPTER`, and the base's folder."""
    expert = with_base(ModelReference.model_validate(reference))
    try:
        return expert, local_folder(str(base_of(expert)), adapters, trust)
    except (TrainingError, DamagedFileError) as error:
        if "+" in reference or not expert.lora:
            raise
        raise TrainingError(
            f"the base that the adapter {reference} names is not here: {error}; write "
            f"BASE+{reference}, with the folder of the base"
        ) from error


def _check_weights(
    reference: str, weights: Mapping[str, Tensor], start: Mapping[str, Tensor],
    model: PreTrainedModel,
) -> None:  # fmt: skip
    """Raise unless a model stores the decoder layers of the merge under the merge's names."""
    read = ("model.embed_tokens.", "model.layers.")
    names = [name for name, _ in model.named_parameters() if name.startswith(read)]
    for name in names or ["model.layers.0"]:
        if name not in weights:
            raise TrainingError(
                f"model {reference} has no tensor {name}; only language models of Llama's kind "
                "that are stored as transformers holds them can be calibrated"
            )
        embeddings = name.startswith("model.embed_tokens.")  # of which some have more rows
        first = 1 if embeddings else 0
        if name in start and weights[name].shape[first:] != start[name].shape[first:]:
            raise TrainingError(
                f"tensor {name} has shape {tuple(weights[name].shape)} in {reference}, but "
                f"{tuple(start[name].shape)} in the merge; give the experts that were merged"
            )


def _check_window(model: PreTrainedModel, longest: int) -> None:
    """Raise where a sample is longer than the attention of a layer reaches back."""
    window = getattr(model.config, "sliding_window", None)
    if window is not None and longest > window:
        raise TrainingError(
            f"a sample has {longest} tokens, but the attention of {type(model).__name__} reaches "
            f"back {window}; add max_length: {window} to all data"
        )


def write_checkpoint(start: Path, folder: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    """Write all files of a checkpoint into a folder, with tensors that a function returns."""
    weights = {path.name for path in weight_files(start)}
    left = weights | {MANIFEST_FILE}  # of `mergekit-ace merge`, which could not resume this
    shutil.copytree(start, folder, ignore=lambda _, names: left & set(names))
    for name in sorted(weights):
        with open_tensors(start / name) as file:
            names, metadata = list(file.keys()), file.metadata()
            tensors = {key: change(key, file.get_tensor(key)) for key in names}
        save_tensors(folder / name, tensors, metadata)


def _part_of_the_way(new: Mapping[str, Path]) -> Callable[[str, Tensor], Tensor]:
    """Return what goes `STEP` of the way from a tensor to that in a file, in its dtype."""

    def change(name: str, merged: Tensor) -> Tensor:
        if name not in new:
            return merged
        with open_tensors(new[name]) as file:
            return torch.lerp(merged.float(), file.get_tensor(name), STEP).to(merged.dtype)

    return change
