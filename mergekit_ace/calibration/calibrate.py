# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace calibrate`: a `calibrate.yml`, its models and samples, and the result."""

from __future__ import annotations

import math
import os
import shutil
from collections import ChainMap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from mergekit.common import ModelReference
from pydantic import Field, model_validator
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.adapters.merge import AdaptedWeights
from mergekit_ace.adapters.plan import base_of, with_base
from mergekit_ace.calibration.layers import RIDGE, TABLE, Calibration, SampleTeacher, Weights
from mergekit_ace.calibration.scaling import ChosenScale, ScaledWeights, ScaleSearch
from mergekit_ace.files.checkpoints import weight_files
from mergekit_ace.files.headers import DamagedFileError
from mergekit_ace.files.saving import locked, package_versions, save_tensors
from mergekit_ace.merging.manifest import MANIFEST_FILE
from mergekit_ace.naming import short_names
from mergekit_ace.report.card import markdown_text
from mergekit_ace.training.config import DataConfig, ExpertConfig, Strict, Task
from mergekit_ace.training.data import Batch, Example, read_rows
from mergekit_ace.training.mapped_weights import map_folder, map_tensors, rewrite_tensors
from mergekit_ace.training.models import load_model, load_processor, load_skeleton, local_folder
from mergekit_ace.training.own_texts import write_own_texts
from mergekit_ace.training.state import TrainingError
from mergekit_ace.training.tasks import CausalLanguageModel, fit_to_model
from mergekit_ace.training.teachers import check_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Share of the way from the merge to the solution that weights go. For full fine-tunes, half of it
# gains nearly as much on held-out texts, and changes less of what the samples do not show. Adapters
# gain more by all of it.
STEP, STEP_OF_ADAPTERS = 0.5, 1.0
SAMPLES = 64  # of each teacher, unless its data says otherwise
SEED = 0  # of the draw of samples
TOKENS = 4096  # of the samples that go through a layer together, or more of a longer one
# For the choice of λ, of each expert: tokens that are read, and those of them before which
# distributions are compared.
READ, COMPARED = 2048, 512


class CalibrateConfig(Strict):
    """Settings of a `calibrate.yml`, for language models of Llama's kind.

    Attributes:
        merged_model: the merge to start from: a folder or a name on the Hub.
        base_model: what the experts were fine-tuned from. With it, λ of the merge is chosen first;
            without, the merge is taken as it is.
        models: the experts that were merged, each with texts of what it is for; `samples` rows of
            them are read, 64 by default, without any label. An expert without data writes 64 texts
            itself.
        keep: texts of any kind on which the merge should stay as it is. Without them, the base
            model writes some, or the merge where there is no `base_model`.
        trust_remote_code: as in transformers.
    """

    merged_model: str
    base_model: str | None = None
    models: Annotated[tuple[ExpertConfig, ...], Field(min_length=1)]
    keep: DataConfig | None = None
    trust_remote_code: bool = False
    task: ClassVar[Task] = "causal-lm"

    @model_validator(mode="after")
    def _check(self) -> CalibrateConfig:
        for name, data in self.sources:
            if data is not None and data.image is not None:
                raise ValueError(f"the data of {name} needs a column text, prompt or messages")
        return self

    @property
    def sources(self) -> tuple[tuple[str, DataConfig | None], ...]:
        """All data by the name of its teacher; last what should stay. None is to be written."""
        return (*((expert.task, expert.data) for expert in self.models), ("keep", self.keep))


def run_calibration(
    config: CalibrateConfig, out: Path, *, overwrite: bool = False, quiet: bool = False
) -> Path:
    """Calibrate a merge; the checkpoint in `out` has the files of the merge.

    Raises:
        TrainingError: something about the config, the models or the data is wrong, or the models
            are not of Llama's kind.
    """
    out = out.resolve()  # a link is not replaced, but what it leads to
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise TrainingError(f"{out} is not empty; give another folder, or --overwrite")
        if not (out / "config.json").is_file():
            raise TrainingError(f"{out} holds something else than a model; give another folder")
    experts = [with_base(ModelReference.model_validate(one.model)) for one in config.models]
    work = out.with_name(out.name + ".partial")
    for folder in (out, work):
        _check_apart(config, experts, folder)
    busy = f"another run is writing to {work}; wait for it, or choose another folder"
    with locked(out.parent, work.name + ".lock", TrainingError(busy)):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            _calibrate(config, experts, work, quiet)
            shutil.rmtree(out, ignore_errors=True)
            os.replace(work / "result", out)
        finally:
            shutil.rmtree(work)
    return out


def _check_apart(config: CalibrateConfig, experts: Iterable[ModelReference], out: Path) -> None:
    """Raise if what is written would replace or drop something that is read, or lie in it."""
    named = (config.merged_model, config.base_model)
    models = [*map(ModelReference.model_validate, filter(None, named)), *experts]
    paths = [part.path for one in models for part in (one.model, one.lora) if part is not None]
    paths += [os.path.expanduser(data.path) for _, data in config.sources if data is not None]
    for place in (Path(path).resolve() for path in paths if os.path.exists(path)):
        if out.is_relative_to(place) or place.is_relative_to(out):
            raise TrainingError(
                f"{out} is or holds {place}, which is read, or lies in it; give another folder"
            )


def _calibrate(
    config: CalibrateConfig, references: Sequence[ModelReference], work: Path, quiet: bool
) -> None:
    """Write the calibrated merge to the folder `result` in a folder for what is unfinished."""
    merge = _find_model(config.merged_model, config, work)
    pairs = zip(references, config.models, strict=True)
    experts = [_find_expert(one, given.model, config, work) for one, given in pairs]
    base = None if config.base_model is None else _find_model(config.base_model, config, work)
    skeleton = load_skeleton(merge.folder, CausalLanguageModel(), config)
    for model in (merge, *experts, *([base] if base else [])):
        _check_weights(model, skeleton)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    calibration, start = Calibration(skeleton, device), merge.weights
    calibration.check(start)
    writers = [*experts, base or merge]
    texts = _read_texts(config, [*experts, merge], writers, skeleton, work / "texts", quiet)
    weights, chosen = [one.weights for one in experts], None
    if base is not None:
        compared = zip(weights, map(comparison_batches, texts[:-1]), strict=True)
        with tqdm(desc="choosing λ", unit=" readings", disable=quiet) as bar:
            tried = ScaleSearch(skeleton, base.weights, start, list(compared), device, bar.update)
            chosen = tried.choose()
        if not quiet:
            print(chosen)
        start = ScaledWeights(base.weights, start, chosen.scale)
    shares = [*[1 / len(experts)] * len(experts), 1.0]
    batches = map(calibration_batches, texts)
    teachers = list(map(SampleTeacher, [*weights, start], batches, shares))
    step = STEP_OF_ADAPTERS if all(one.adapted for one in experts) else STEP
    layers = calibration.layers(start, teachers)
    bar = tqdm(layers, "calibrating layers", len(skeleton.model.layers), disable=quiet)
    solved = _keep_layers(bar, start, step, merge, work)
    write_checkpoint(Path(merge.folder), work / "result", ChainMap(solved, start).__getitem__)
    with open(work / "result" / "README.md", "a", encoding="utf-8") as card:
        card.write(f"\n\n{card_section(config, teachers, step, chosen)}\n")


def _keep_layers(
    layers: Iterable[dict[str, Tensor]], start: Weights, step: float, merge: _Model, work: Path
) -> dict[str, Tensor]:
    """Save the new weights of every layer as it comes, and return them, mapped.

    Args:
        step: share of the way from the start to the solution.
    """
    kept: dict[str, Tensor] = {}
    for place, layer in enumerate(layers):
        path = str(work / f"layer-{place}.safetensors")
        parts = {name: torch.lerp(start[name].float(), layer[name], step) for name in layer}
        save_tensors(path, {n: part.to(merge.stored[n].dtype) for n, part in parts.items()})
        kept |= map_tensors({name: (path, name) for name in parts})
    return kept


@dataclass(frozen=True)
class _Model:
    """A model of the config, with its adapter if it has one.

    Attributes:
        reference: as messages name it, without the adapter.
        folder, stored: of the model without the adapter; its tensors, mapped.
        adapted: `BASE+ADAPTER`; None without an adapter.
    """

    reference: str
    folder: str
    stored: dict[str, Tensor]
    adapted: ModelReference | None = None

    @cached_property
    def weights(self) -> Weights:
        """The weights by name, with the adapter."""
        return AdaptedWeights(self.adapted, self.stored) if self.adapted else self.stored


def _find_model(reference: str, config: CalibrateConfig, work: Path) -> _Model:
    """Find a model; one that is given with an adapter is merged with it in the folder `work`."""
    folder = local_folder(reference, work / "adapters", config.trust_remote_code)
    return _Model(reference, folder, map_folder(folder))


def _find_expert(expert: ModelReference, given: str, config: CalibrateConfig, work: Path) -> _Model:
    """Find an expert, of an adapter its base.

    Args:
        expert: `BASE+ADAPTER` for an adapter, whatever was given.
    """
    try:
        found = _find_model(str(base_of(expert)), config, work)
    except (TrainingError, DamagedFileError) as error:
        if "+" in given or not expert.lora:
            raise
        raise TrainingError(
            f"the base that the adapter {given} names is not here: {error}; write BASE+{given}, "
            "with the folder of the base"
        ) from error
    return replace(found, adapted=expert if expert.lora else None)


def _check_weights(model: _Model, skeleton: PreTrainedModel) -> None:
    """Raise unless a model stores the decoder layers of the merge under the merge's names."""
    read = ("model.embed_tokens.", "model.layers.")
    shapes = {n: p.shape for n, p in skeleton.named_parameters() if n.startswith(read)}
    for name, shape in shapes.items() or [("model.layers.0", ())]:
        first = 1 if name.startswith(read[0]) else 0  # some have more rows of embeddings
        tensor = model.stored.get(name)
        if tensor is None or tensor.shape[first:] != shape[first:]:
            what = "nothing" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise TrainingError(
                f"model {model.reference} has {what} for the tensor {name} of shape {tuple(shape)} "
                "in the merge; give the experts that were merged, language models of Llama's kind "
                "that are stored as transformers holds them"
            )


def _read_texts(
    config: CalibrateConfig, readers: Sequence[_Model], writers: Sequence[_Model],
    skeleton: PreTrainedModel, place: Path, quiet: bool,
) -> list[list[Example]]:  # fmt: skip
    """Return the samples of every expert, and last of what should stay.

    Args:
        readers: the experts, and last the merge.
        writers: of each, who writes its texts where it has no data.
        place: folder for these.
    """
    tokenizer = load_processor(
        [one.folder for one in (readers[-1], *readers[:-1])], CausalLanguageModel(), config
    )
    window, texts = getattr(skeleton.config, "sliding_window", None), []
    for number, (_, data) in enumerate(config.sources):
        if data is None:
            model, path = _load_whole(writers[number], config), place / f"{number}.jsonl"
            data = write_own_texts(model, tokenizer, SAMPLES, path, quiet=quiet)
            del model
        samples = read_samples(fit_to_model(data, skeleton), tokenizer)
        for reader in (readers[-1], readers[number]):
            check_tokens(samples, data, reader.folder, len(reader.weights[TABLE]))
        longest = len(samples[0]["input_ids"])
        if window is not None and longest > window:
            raise TrainingError(
                f"a sample has {longest} tokens, but the attention of {type(skeleton).__name__} "
                f"reaches back {window}; add max_length: {window} to all data"
            )
        texts.append(samples)
    return texts


def _load_whole(writer: _Model, config: CalibrateConfig) -> PreTrainedModel:
    """Load a model that writes texts, with its adapter if it has one."""
    options = {"device_map": "auto"} if torch.cuda.is_available() else {}
    model = load_model(writer.folder, CausalLanguageModel(), config, whole=True, **options)
    if writer.adapted:
        for name, parameter in model.named_parameters():
            parameter.copy_(writer.weights[name])
    return model


def read_samples(data: DataConfig, tokenizer: Any) -> list[Example]:
    """Return the samples of a teacher, as `CausalLanguageModel.encode` makes them, longest first.

    Raises:
        TrainingError: there are none.
    """
    data = data.model_copy(update={"samples": data.samples or SAMPLES})
    kind = CausalLanguageModel()
    encoded = (kind.encode(row, data, tokenizer) for row in read_rows(data, SEED))
    samples = [one for one in encoded if one is not None and len(one["input_ids"]) > 1]
    samples.sort(key=lambda one: len(one["input_ids"]), reverse=True)
    if not samples:
        raise TrainingError(f"data {data.path} has no text of two tokens or more")
    return samples


def calibration_batches(samples: Sequence[Example]) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and which of them count, (n, length) each, longest samples first."""
    batches = (CausalLanguageModel().collate(group) for group in _group(samples, TOKENS))
    return [(batch["input_ids"], batch["attention_mask"].bool()) for batch in batches]


def comparison_batches(samples: Sequence[Example]) -> list[Batch]:
    """Return some of the samples of an expert, supervised at some of their tokens.

    Args:
        samples: at least one, longest first. Where nothing is supervised, as in prompts without a
            completion, all tokens are.
    """
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    chosen = samples[:: math.ceil(tokens / READ)]
    marks = []
    for sample in chosen:
        own = sample["supervised"]
        marks.append(own.clone() if own.any() else torch.ones_like(own))
        marks[-1][0] = False  # nothing comes before it
    numbers = torch.cat(marks).cumsum(0) - 1  # of the supervised tokens of all samples
    every = max(1, math.ceil((int(numbers[-1]) + 1) / COMPARED))
    counted = (numbers % every == 0).split([len(own) for own in marks])
    compared = [
        {**sample, "supervised": own & part}
        for sample, own, part in zip(chosen, marks, counted, strict=True)
    ]
    return [CausalLanguageModel().collate(group) for group in _group(compared, READ)]


def _group(samples: Sequence[Example], tokens: int) -> list[list[Example]]:
    """Group samples, longest first, so that padded ones of a group have so many tokens at most.

    A single longer one is a group of its own.
    """
    groups: list[list[Example]] = []
    for sample in samples:
        if not groups or (len(groups[-1]) + 1) * len(groups[-1][0]["input_ids"]) > tokens:
            groups.append([])
        groups[-1].append(sample)
    return groups


def write_checkpoint(start: Path, folder: Path, changed: Callable[[str], Tensor | None]) -> None:
    """Write all files of a checkpoint into a folder, with some tensors changed.

    Args:
        folder: of the new one, which does not exist yet.
        changed: see `rewrite_tensors`.
    """
    weights = {path.name for path in weight_files(start)}
    left = weights | {MANIFEST_FILE}  # of `mergekit-ace merge`, which could not resume this
    shutil.copytree(start, folder, ignore=lambda _, names: left & set(names))
    for name in sorted(weights):
        rewrite_tensors(start / name, folder / name, changed)


def card_section(
    config: CalibrateConfig, teachers: Sequence[SampleTeacher], step: float,
    chosen: ChosenScale | None,
) -> str:  # fmt: skip
    """Return the section; it names no folder of this machine.

    Args:
        teachers: the experts, and last the merge itself on what should stay.
        step: share of the way from the merge to the solution.
    """
    names = short_names([expert.task for expert in config.models])
    rows = ["| texts of | sequences | tokens | from |", "|---|---|---|---|"]
    shown = zip([*names, "what should stay"], config.sources, teachers, strict=True)
    for name, (_, data), teacher in shown:
        sequences = sum(len(ids) for ids, _ in teacher.batches)
        writer = "data" if data is not None else "a model, which wrote them itself"
        rows.append(f"| {markdown_text(name)} | {sequences} | {teacher.tokens} | {writer} |")
    before = "" if chosen is None else f"{chosen} "
    share = "all" if step == 1.0 else f"{step:g}"
    (version,) = package_versions("mergekit-ace").values()
    return "\n\n".join([
        "## Calibration",
        f"The merge was then calibrated by `mergekit-ace calibrate` (version {version}): every "
        "linear of attention and MLP was solved anew, so that it does on some texts of each expert "
        "what the expert does, and on others what it did before. All other tensors are those of "
        f"the merge. {before}The ridge was {RIDGE:g}, in mean eigenvalues of the inputs' "
        f"covariance, and the weights went {share} of the way from the merge to the solution.",
        "\n".join(rows),
    ])  # fmt: skip
