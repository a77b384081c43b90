# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace calibrate`: a `calibrate.yml`, its samples, the command, and what the card says."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from mergekit.common import ModelReference
from pydantic import Field, model_validator
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.adapters.adapter_plan import base_of, with_base
from mergekit_ace.adapters.adapter_tasks import AdaptedWeights
from mergekit_ace.adapters.peft_adapter import adapter_folder
from mergekit_ace.calibration.layerwise import RIDGE, Calibration, SampleTeacher, Weights
from mergekit_ace.calibration.scaling import ChosenScale, ScaleSearch, WeightsBetween
from mergekit_ace.files.checkpoints import weight_files
from mergekit_ace.files.headers import DamagedFileError
from mergekit_ace.files.saving import locked, package_versions, save_tensors
from mergekit_ace.merging.manifest import MANIFEST_FILE
from mergekit_ace.naming import short_names
from mergekit_ace.report.markdown import markdown_text
from mergekit_ace.training.config import DataConfig, ExpertConfig, Strict, Task
from mergekit_ace.training.data import Batch, Example, read_rows
from mergekit_ace.training.mapped_weights import map_folder, map_tensors, rewrite_tensors
from mergekit_ace.training.models import load_model, load_processor, load_skeleton, local_folder
from mergekit_ace.training.own_texts import write_own_texts
from mergekit_ace.training.state import TrainingError
from mergekit_ace.training.tasks import CausalLanguageModel, fit_to_model, pad, padding_mask
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
    work = out.with_name(out.name + ".partial")
    busy = f"another run is writing to {work}; wait for it, or choose another folder"
    with locked(out.parent, work.name + ".lock", TrainingError(busy)):
        _check_apart(config, work, _named_folders(config))
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            _calibrate(config, out, work, quiet)
        finally:
            shutil.rmtree(work)
    return out


def _calibrate(config: CalibrateConfig, out: Path, work: Path, quiet: bool) -> None:
    """Calibrate a merge by way of a folder for what is unfinished."""
    folder, calibration, step, chosen = _prepare(config, out, work, quiet)
    if chosen is not None and not quiet:
        print(chosen)
    start, new = calibration.start, {}
    depth = len(calibration.model.model.layers)
    bar = tqdm(calibration.layers(), "calibrating layers", depth, disable=quiet)
    for place, solved in enumerate(bar):
        path = str(work / f"layer-{place}.safetensors")
        parts = {n: torch.lerp(start[n].float(), solved[n], step) for n in solved}
        save_tensors(path, {name: part.to(start[name].dtype) for name, part in parts.items()})
        new |= map_tensors({name: (path, name) for name in parts})
    write_checkpoint(folder, work / "result", new.get)
    with open(work / "result" / "README.md", "a", encoding="utf-8") as card:
        card.write(f"\n\n{card_section(config, calibration.teachers, step, chosen)}\n")
    shutil.rmtree(out, ignore_errors=True)
    os.replace(work / "result", out)


def _prepare(
    config: CalibrateConfig, out: Path, work: Path, quiet: bool
) -> tuple[Path, Calibration, float, ChosenScale | None]:
    """Find and check the models, read the texts, choose λ.

    Returns:
        The folder to start from, what is to be solved, the share of the way that weights go, and λ.
    """
    experts, folders = _find_models(config, work / "adapters")
    _check_apart(config, out, [*folders, *(adapter_folder(e.lora) for e in experts if e.lora)])
    model = load_skeleton(folders[0], CausalLanguageModel(), config)
    start, *others = map(map_folder, folders)
    references = [config.merged_model, *(str(base_of(one)) for one in experts), config.base_model]
    for reference, tensors in zip(references, (start, *others), strict=False):
        _check_weights(reference, tensors, model)
    weights = [
        AdaptedWeights(expert, tensors) if expert.lora else tensors
        for expert, tensors in zip(experts, others, strict=False)
    ]
    texts = _read_texts(config, model, folders, (*weights, start), work / "texts", quiet)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    folder, chosen = Path(folders[0]), None
    if config.base_model is not None:
        base, compared = others[-1], [comparison_batches(own) for own in texts[:-1]]
        pairs = list(zip(weights, compared, strict=True))
        with tqdm(desc="choosing λ", unit=" readings", disable=quiet) as bar:
            chosen = ScaleSearch(model, base, start, pairs, device, bar.update).choose()
        scaled = WeightsBetween(base, start, chosen.scale)
        write_checkpoint(folder, work / "scaled", scaled.__getitem__)
        folder = work / "scaled"
        start = map_folder(folder)
    shares = (*[1 / len(experts)] * len(experts), 1.0)
    teachers = [
        SampleTeacher(tensors, calibration_batches(own), share)
        for tensors, own, share in zip((*weights, start), texts, shares, strict=True)
    ]
    step = STEP_OF_ADAPTERS if all(one.lora for one in experts) else STEP
    return folder, Calibration(model, start, teachers, device), step, chosen


def _find_models(config: CalibrateConfig, adapters: Path) -> tuple[list[ModelReference], list[str]]:
    """Return the experts, and the folders of the merge, of the experts' weights, and of the base.

    Those of the weights of `BASE+ADAPTER` are the base's; the last folder is there with a base.
    """
    trust = config.trust_remote_code
    found = [_find_expert(one.model, adapters, trust) for one in config.models]
    folders = [local_folder(config.merged_model, adapters, trust), *(place for _, place in found)]
    if config.base_model is not None:
        folders.append(local_folder(config.base_model, adapters, trust))
    return [expert for expert, _ in found], folders


def _named_folders(config: CalibrateConfig) -> list[str]:
    """Return where the models of a config are, or would be if they are not on the Hub."""
    named = [config.merged_model, *(one.model for one in config.models)]
    named += [config.base_model] if config.base_model is not None else []
    parts = (ModelReference.model_validate(reference) for reference in named)
    return [str(part.path) for one in parts for part in (one.model, one.lora) if part is not None]


def _check_apart(config: CalibrateConfig, out: Path, models: Iterable[str]) -> None:
    """Raise if what is written would replace or drop something that is read, or lie in it."""
    data = (os.path.expanduser(data.path) for _, data in config.sources if data is not None)
    for place in (Path(one).resolve() for one in (*models, *data) if os.path.exists(one)):
        if out.is_relative_to(place) or place.is_relative_to(out):
            raise TrainingError(
                f"{out} is or holds {place}, which is read, or lies in it; give another folder"
            )


def _read_texts(
    config: CalibrateConfig, model: PreTrainedModel, folders: Sequence[str],
    weights: Sequence[Weights], place: Path, quiet: bool,
) -> list[list[Example]]:  # fmt: skip
    """Return the samples of every expert, and last of what should stay.

    Args:
        folders: see `_find_models`.
        weights: of every expert, and last of the merge.
        place: folder for texts that models write themselves.
    """
    tokenizer = load_processor(folders[: len(weights)], CausalLanguageModel(), config)
    keeper = folders[-1 if config.base_model is not None else 0]
    writers = (*folders[1 : len(weights)], keeper)
    window, texts = getattr(model.config, "sliding_window", None), []
    for number, (_, data) in enumerate(config.sources):
        writer, own = writers[number], weights[number]
        if data is None:
            data = _let_write(writer, own, config, tokenizer, place / f"{number}.jsonl", quiet)
        samples = read_samples(fit_to_model(data, model), tokenizer)
        for folder, tensors in ((folders[0], weights[-1]), (writer, own)):
            check_tokens(samples, data, folder, len(tensors["model.embed_tokens.weight"]))
        longest = len(samples[0]["input_ids"])
        if window is not None and longest > window:
            raise TrainingError(
                f"a sample has {longest} tokens, but the attention of {type(model).__name__} "
                f"reaches back {window}; add max_length: {window} to all data"
            )
        texts.append(samples)
    return texts


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


def _let_write(
    folder: str, weights: Weights, config: CalibrateConfig, tokenizer: Any, file: Path, quiet: bool
) -> DataConfig:
    """Let a model write texts, the whole of it in memory.

    Args:
        folder: of the model, or of the base of an adapter.
        weights: of the model with its adapter, if it has one.
    """
    options = {"device_map": "auto"} if torch.cuda.is_available() else {}
    model = load_model(folder, CausalLanguageModel(), config, whole=True, **options)
    if isinstance(weights, AdaptedWeights):
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])
    return write_own_texts(model, tokenizer, SAMPLES, file, quiet=quiet)


def _check_weights(reference: str, weights: Weights, model: PreTrainedModel) -> None:
    """Raise unless a model stores the decoder layers of the merge under the merge's names."""
    read = ("model.embed_tokens.", "model.layers.")
    shapes = {n: p.shape for n, p in model.named_parameters() if n.startswith(read)}
    for name, shape in shapes.items() or [("model.layers.0", ())]:
        first = 1 if name.startswith(read[0]) else 0  # some have more rows of embeddings
        if name not in weights or weights[name].shape[first:] != shape[first:]:
            what = f"shape {tuple(weights[name].shape)}" if name in weights else "nothing"
            raise TrainingError(
                f"model {reference} has {what} for the tensor {name} of shape {tuple(shape)} in "
                "the merge; give the experts that were merged, language models of Llama's kind "
                "that are stored as transformers holds them"
            )


def read_samples(data: DataConfig, tokenizer: Any) -> list[Example]:
    """Return the samples of a teacher, as `CausalLanguageModel.encode` makes them, longest first.

    Raises:
        TrainingError: there are none.
    """
    data = data.model_copy(update={"samples": data.samples or SAMPLES})
    kind = CausalLanguageModel()
    encoded = (kind.encode(row, data, tokenizer) for row in read_rows(data, SEED))
    rows = [one for one in encoded if one is not None and len(one["input_ids"]) > 1]
    rows.sort(key=lambda one: len(one["input_ids"]), reverse=True)
    if not rows:
        raise TrainingError(f"data {data.path} has no text of two tokens or more")
    return rows


def calibration_batches(samples: Sequence[Example]) -> list[tuple[Tensor, Tensor]]:
    """Return tokens and which of them count, (n, length) each, longest samples first."""
    groups = [[one["input_ids"] for one in group] for group in _group(samples, TOKENS)]
    return [(pad(group), padding_mask(group).bool()) for group in groups]


def comparison_batches(samples: Sequence[Example]) -> list[Batch]:
    """Return some of the samples of an expert, supervised at some of their tokens.

    Args:
        samples: at least one, longest first. Where nothing is supervised, as in prompts without a
            completion, all tokens are.
    """
    tokens = sum(len(sample["input_ids"]) for sample in samples)
    chosen = samples[:: max(1, math.ceil(tokens / READ))]
    marks = []
    for sample in chosen:
        own = sample["supervised"]
        marks.append(own.clone() if bool(own.any()) else torch.ones_like(own))
        marks[-1][0] = False  # nothing comes before it
    every = max(1, math.ceil(sum(int(own.sum()) for own in marks) / COMPARED))
    seen, compared = 0, []
    for sample, own in zip(chosen, marks, strict=True):
        numbers = own.cumsum(dim=0) - 1 + seen  # of the supervised tokens of all samples
        compared.append({**sample, "supervised": own & (numbers % every == 0)})
        seen += int(own.sum())
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
        tokens = sum(int(used.sum()) for _, used in teacher.batches)
        writer = "data" if data is not None else "a model, which wrote them itself"
        rows.append(f"| {markdown_text(name)} | {sequences} | {tokens} | {writer} |")
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
