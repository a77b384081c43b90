# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace calibrate`: a `calibrate.yml`, its models and samples, and the result."""

from __future__ import annotations

import math
import os
import shutil
from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import torch
from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from pydantic import Field, model_validator
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.adapters.read import base_of, read_adapters
from mergekit_ace.calibration.layers import RIDGE, TABLE, Calibration, SampleTeacher
from mergekit_ace.calibration.scaling import ScaledWeights, best_scale, share_gone
from mergekit_ace.files.checkpoints import weight_files
from mergekit_ace.files.saving import locked, package_versions, save_tensors
from mergekit_ace.merging.output import MANIFEST_FILE
from mergekit_ace.naming import ConfigError, short_names
from mergekit_ace.report.card import markdown_text
from mergekit_ace.training.config import DataConfig, ExpertConfig, Strict, Task
from mergekit_ace.training.data import check_tokens, read_rows
from mergekit_ace.training.merged import map_folder, map_tensors, rewrite_tensors
from mergekit_ace.training.models import load_model, load_processor, load_skeleton, local_folder
from mergekit_ace.training.tasks import (
    Batch,
    CausalLanguageModel,
    Example,
    fit_to_model,
    write_own_texts,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

KIND = CausalLanguageModel()
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
        base_model: with it, λ of the merge is chosen first.
        models: the experts that were merged, with texts without labels: 64 unless `samples` says
            otherwise. An expert without data writes 64 texts itself.
        keep: texts on which the merge should stay as it is; else the base writes some, or the merge
            where there is no base.
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
            if data is not None:
                data.check_task(self.task, name)
        return self

    @property
    def sources(self) -> tuple[tuple[str, DataConfig | None], ...]:
        """All data by the name of its teacher; last what should stay. None is to be written."""
        return (*((expert.task, expert.data) for expert in self.models), ("keep", self.keep))


class _Model(Mapping[str, Tensor]):
    """The tensors of a model by name, mapped; an adapter's changes are added when they are read."""

    def __init__(self, reference: str, trust_remote_code: bool):
        parsed = ModelReference.model_validate(reference)
        self.reference = reference
        self.folder = local_folder(str(base_of(parsed)), Path(), trust_remote_code)
        self.stored = map_folder(self.folder)
        self.adapter = read_adapters([parsed]).get(parsed)
        if self.adapter:
            self.adapter.check_ties()

    def __getitem__(self, name: str) -> Tensor:
        change = self.adapter and self.adapter.find_change(WeightInfo(name=name))
        return change.apply(self.stored[name].float()) if change else self.stored[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.stored)

    def __len__(self) -> int:
        return len(self.stored)


def run_calibration(
    config: CalibrateConfig, out: Path, *, overwrite: bool = False, quiet: bool = False
) -> Path:
    """Calibrate a merge; the checkpoint in `out` has the files of the merge.

    Raises:
        ConfigError: something about the config, the models or the data is wrong.
    """
    out = out.resolve()  # a link is not replaced, but what it leads to
    if out.exists() and any(out.iterdir()):
        if not overwrite:
            raise ConfigError(f"{out} is not empty; give another folder, or --overwrite")
        if not (out / "config.json").is_file():
            raise ConfigError(f"{out} holds something else than a model; give another folder")
    work = out.with_name(out.name + ".partial")
    _check_apart(config, out, work)
    busy = f"another run is writing to {work}; wait for it, or choose another folder"
    with locked(out.parent, work.name + ".lock", ConfigError(busy)):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            _calibrate(config, work, quiet)
            shutil.rmtree(out, ignore_errors=True)
            os.replace(work / "result", out)
        finally:
            shutil.rmtree(work)
    return out


def _check_apart(config: CalibrateConfig, *written: Path) -> None:
    """Raise if what is written would replace or drop something that is read, or lie in it."""
    names = (config.merged_model, config.base_model, *(one.model for one in config.models))
    models = map(ModelReference.model_validate, filter(None, names))
    paths = [part.path for one in models for part in (one.model, one.lora) if part is not None]
    paths += [os.path.expanduser(data.path) for _, data in config.sources if data is not None]
    for place in (Path(path).resolve() for path in paths if os.path.exists(path)):
        for out in written:
            if out.is_relative_to(place) or place.is_relative_to(out):
                raise ConfigError(
                    f"{out} is or holds {place}, which is read, or lies in it; give another folder"
                )


def _calibrate(config: CalibrateConfig, work: Path, quiet: bool) -> None:
    """Write the calibrated merge to the folder `result` in a folder for what is unfinished."""
    trust = config.trust_remote_code
    merge, experts = (
        _Model(config.merged_model, trust),
        [_Model(m.model, trust) for m in config.models],
    )
    base = _Model(config.base_model, trust) if config.base_model else None
    skeleton = load_skeleton(merge.folder, KIND, config)
    for model in (merge, *experts, *([base] if base else [])):
        _check_weights(model, skeleton)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    calibration = Calibration(skeleton, device)
    writers = [*experts, base or merge]
    texts = _read_texts(config, [*experts, merge], writers, skeleton, work / "texts", quiet)
    start, scaling = merge, ""
    if base is not None:
        compared = zip(experts, map(comparison_batches, texts[:-1]), strict=True)
        gone = share_gone(skeleton, base, merge, list(compared), device)
        scale, share, before = best_scale(gone)
        start = ScaledWeights(base, merge, scale)
        scaling = (
            f"The merge's change of the base was first multiplied by {scale:g}: that goes "
            f"{share:.2f} of the way from the base to the experts on their texts, the merge as it "
            f"was {before:.2f}. "
        )
        if not quiet:
            print(scaling)
    shares = [*[1 / len(experts)] * len(experts), 1.0]
    batches = [[KIND.collate(group) for group in _group(own, TOKENS)] for own in texts]
    used = [[(one["input_ids"], one["attention_mask"].bool()) for one in own] for own in batches]
    teachers = list(map(SampleTeacher, [*experts, start], used, shares))
    step = STEP_OF_ADAPTERS if all(one.adapter for one in experts) else STEP
    solved: dict[str, Tensor] = {}
    layers = calibration.layers(start, teachers)
    bar = tqdm(layers, "calibrating layers", len(skeleton.model.layers), disable=quiet)
    for place, layer in enumerate(bar):  # kept on the disk, and mapped
        path = str(work / f"layer-{place}.safetensors")
        moved = {n: torch.lerp(start[n].float(), weight, step) for n, weight in layer.items()}
        save_tensors(path, {n: one.to(merge.stored[n].dtype) for n, one in moved.items()})
        solved |= map_tensors({name: (path, name) for name in layer})
    shards, result = weight_files(Path(merge.folder)), work / "result"
    # The manifest of `mergekit-ace merge` could not resume this.
    left = {MANIFEST_FILE, *(shard.name for shard in shards)}
    shutil.copytree(merge.folder, result, ignore=lambda _, names: left & set(names))
    for shard in shards:
        rewrite_tensors(shard, result / shard.name, ChainMap(solved, start).__getitem__)
    with open(result / "README.md", "a", encoding="utf-8") as card:
        card.write(f"\n\n{_card_section(config, teachers, step, scaling)}\n")


def _check_weights(model: _Model, skeleton: PreTrainedModel) -> None:
    """Raise unless a model stores the decoder layers of the merge under the merge's names."""
    for name, parameter in skeleton.named_parameters():
        own, first = model.stored.get(name), int(name == TABLE)  # of which some have more rows
        read = name == TABLE or name.startswith("model.layers.")
        if read and (own is None or own.shape[first:] != parameter.shape[first:]):
            raise ConfigError(
                f"the tensor {name} of {model.reference} is missing, or not of the merge's shape "
                f"{tuple(parameter.shape)}; give the experts that were merged, stored as "
                "transformers holds them"
            )


def _read_texts(
    config: CalibrateConfig, readers: Sequence[_Model], writers: Sequence[_Model],
    skeleton: PreTrainedModel, place: Path, quiet: bool,
) -> list[list[Example]]:  # fmt: skip
    """Return the samples of every expert, and last of what should stay; the longest first.

    Readers are the experts, and last the merge; writers, who writes texts where there are no data.
    """
    folders = [one.folder for one in (readers[-1], *readers[:-1])]
    tokenizer = load_processor(folders, KIND, config)
    options: dict[str, Any] = {"device_map": "auto"} if torch.cuda.is_available() else {}
    window, texts = getattr(skeleton.config, "sliding_window", None) or math.inf, []
    for number, (_, data) in enumerate(config.sources):
        if data is None:
            writer, path = writers[number], place / f"{number}.jsonl"
            model = load_model(writer.folder, KIND, config, **options)
            if writer.adapter:
                for name, parameter in model.named_parameters():
                    parameter.copy_(writer[name])
            data = write_own_texts(model, tokenizer, SAMPLES, path, quiet=quiet)
            del model
        data = fit_to_model(data, skeleton)
        cut = {"samples": data.samples or SAMPLES, "max_length": min(data.max_length, window)}
        data = data.model_copy(update=cut)
        encoded = (KIND.encode(row, data, tokenizer) for row in read_rows(data, SEED))
        samples = [one for one in encoded if one is not None and len(one["input_ids"]) > 1]
        samples.sort(key=lambda one: len(one["input_ids"]), reverse=True)
        if not samples:
            raise ConfigError(f"data {data.path} has no text of two tokens or more")
        for reader in (readers[-1], readers[number]):
            check_tokens(samples, data, reader.folder, len(reader[TABLE]))
        texts.append(samples)
    return texts


def comparison_batches(samples: Sequence[Example]) -> list[Batch]:
    """Return some of the samples of an expert, longest first, supervised at some of their tokens.

    Where nothing is supervised, as in prompts without a completion, all tokens are.
    """
    chosen = samples[:: math.ceil(sum(len(one["input_ids"]) for one in samples) / READ)]
    places = []
    for sample in chosen:
        own = sample["supervised"]
        supervised = (own if own.any() else torch.ones_like(own)).nonzero().flatten()
        places.append(supervised[supervised > 0])  # nothing comes before the first
    every = max(1, math.ceil(sum(map(len, places)) / COMPARED))
    compared = []
    for sample, supervised in zip(chosen, places, strict=True):
        mark = torch.zeros_like(sample["supervised"])
        mark[supervised[::every]] = True
        compared.append({**sample, "supervised": mark})
    return [KIND.collate(group) for group in _group(compared, READ)]


def _group(samples: Iterable[Example], tokens: int) -> list[list[Example]]:
    """Group samples, longest first, so that padded ones have so many tokens, or are alone."""
    groups: list[list[Example]] = []
    for sample in samples:
        if not groups or (len(groups[-1]) + 1) * len(groups[-1][0]["input_ids"]) > tokens:
            groups.append([])
        groups[-1].append(sample)
    return groups


def _card_section(
    config: CalibrateConfig, teachers: Sequence[SampleTeacher], step: float, scaling: str
) -> str:
    """Return the section of the model card; it names no folder of this machine."""
    names = [*short_names([expert.task for expert in config.models]), "what should stay"]
    rows = ["| texts of | sequences | tokens | from |", "|---|---|---|---|"]
    for name, (_, data), teacher in zip(names, config.sources, teachers, strict=True):
        sequences = sum(len(ids) for ids, _ in teacher.batches)
        writer = "data" if data is not None else "a model, which wrote them itself"
        rows.append(f"| {markdown_text(name)} | {sequences} | {teacher.tokens} | {writer} |")
    (version,) = package_versions("mergekit-ace").values()
    return (
        f"## Calibration\n\nThe merge was then calibrated by `mergekit-ace calibrate` (version "
        f"{version}): every linear of attention and MLP was solved anew, so that it does on some "
        "texts of each expert what the expert does, and on others what it did before. All other "
        f"tensors are those of the merge. {scaling}The ridge was {RIDGE:g}, in mean eigenvalues of "
        f"the inputs' covariance, and the weights went {'all' if step == 1 else f'{step:g}'} of "
        "the way from the merge to the solution.\n\n" + "\n".join(rows)
    )
