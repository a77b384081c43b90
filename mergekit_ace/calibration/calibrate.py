# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace calibrate`: a `calibrate.yml`, its models and samples, and the result."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import Annotated, Any, ClassVar, cast

import click
import torch
from mergekit.common import ModelReference
from pydantic import Field, model_validator
from torch import Tensor
from tqdm import tqdm

from mergekit_ace.adapters.read import read_adapters
from mergekit_ace.calibration.layers import (
    KIND,
    KNOWN_MODELS,
    RIDGE,
    TABLE,
    LazyWeights,
    SampleTeacher,
    calibrated_layers,
    choose_scale,
    scaled_weights,
)
from mergekit_ace.files.checkpoints import weight_files
from mergekit_ace.files.saving import check_apart, locked, occupied, package_versions, save_tensors
from mergekit_ace.merging.output import MANIFEST_FILE
from mergekit_ace.naming import ConfigError
from mergekit_ace.training.config import DataConfig, ExpertConfig, Strict, Task
from mergekit_ace.training.data import check_tokens, read_rows
from mergekit_ace.training.models import (
    load_model,
    load_processor,
    load_skeleton,
    local_folder,
    map_file,
    map_folder,
    model_paths,
)
from mergekit_ace.training.tasks import (
    Batch,
    Example,
    fit_to_model,
    write_own_texts,
)

# Share of the way from the merge to the solution that weights go. For full fine-tunes, half of it
# gains nearly as much on held-out texts, and changes less of what the samples do not show. Adapters
# gain more by all of it.
STEP, STEP_OF_ADAPTERS = 0.5, 1.0
SAMPLES = 64  # of each teacher, unless its data says otherwise
SEED = 0  # of the draw of samples
COMPARED = 2048  # tokens of each expert's texts that are read for the choice of λ, with padding


class CalibrateConfig(Strict):
    """Settings of a `calibrate.yml`; `mergekit_ace/calibration/README.md` explains them."""

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


class _Model(LazyWeights):
    """A model whose tensors are mapped; an adapter's changes are added when they are read."""

    def __init__(self, reference: str, trust_remote_code: bool):
        parsed = ModelReference.model_validate(reference)
        self.reference = reference
        self.folder = local_folder(str(parsed.model), Path(), trust_remote_code)
        self.stored = map_folder(self.folder)
        self.adapter = read_adapters([parsed])[parsed] if parsed.lora else None
        if self.adapter:
            self.adapter.check_ties()
        super().__init__(self.stored, self._changed)

    def _changed(self, name: str) -> Tensor:
        change = self.adapter and self.adapter.changes.get(name)
        return change.apply(self.stored[name].float()) if change else self.stored[name]


def run_calibration(
    config: CalibrateConfig, out: Path, *, overwrite: bool = False, quiet: bool = False
) -> None:
    """`mergekit-ace calibrate`: calibrate a merge; the checkpoint in `out` has all of its files."""
    out = out.resolve()  # a link is not replaced, but what it leads to
    if out.exists() and any(out.iterdir()):
        if not (out / "config.json").is_file():
            raise ConfigError(f"{out} holds something else than a model; give another folder")
        if not overwrite:
            raise occupied(out, "a model")
    partial = out.with_name(out.name + ".partial")
    names = (config.merged_model, config.base_model, *(one.model for one in config.models))
    data = [one.path for _, one in config.sources if one is not None]
    check_apart([*model_paths(filter(None, names)), *data], [out, partial])
    with locked(partial):
        work = partial / "work"
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            _calibrate(config, work, quiet)
            shutil.rmtree(out, ignore_errors=True)
            os.replace(work / "result", out)
        finally:
            shutil.rmtree(partial, ignore_errors=True)


def _calibrate(config: CalibrateConfig, work: Path, quiet: bool) -> None:
    """Write the calibrated merge to the folder `result` in a folder for what is unfinished."""
    trust = config.trust_remote_code
    merge = _Model(config.merged_model, trust)
    experts = [_Model(expert.model, trust) for expert in config.models]
    base = _Model(config.base_model, trust) if config.base_model else None
    skeleton: Any = load_skeleton(merge.folder, KIND, config)
    if type(skeleton) not in KNOWN_MODELS:
        raise ConfigError(
            f"{type(skeleton).__name__} cannot be calibrated, as its decoder layers are not those "
            "of Llama, Mistral, Qwen2 or Qwen3"
        )
    for model in (merge, *experts, base or merge):
        _check_weights(model, skeleton)
    tokenizer = load_processor([one.folder for one in (merge, *experts)], KIND, config)
    samples = []
    sources = zip([*experts, merge], [*experts, base or merge], config.sources, strict=True)
    for number, (reader, writer, (_, data)) in enumerate(sources):
        if data is None:
            path = work / "texts" / f"{number}.jsonl"
            data = _write_texts(writer, config, tokenizer, path, quiet)
        samples.append(_read_texts(data, skeleton, tokenizer, [merge, reader]))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    start, way = merge, ""
    if base is not None:
        compared = zip(experts, map(comparison_batch, samples[:-1]), strict=True)
        scale, share, before = choose_scale(skeleton, base, merge, list(compared), device)
        start = scaled_weights(base, merge, scale)
        way = (
            f"On its texts, the merge goes {before:.2f} of the way from the base to an expert, and "
            f"{share:.2f} with its change of the base multiplied by {scale:g}, as it was first. "
        )
        if not quiet:
            click.echo(way)
    shares = [*[1 / len(experts)] * len(experts), 1.0]
    texts = [[one["input_ids"] for one in own] for own in samples]
    teachers = list(map(SampleTeacher, [*experts, start], texts, shares))
    step = STEP_OF_ADAPTERS if all(one.adapter for one in experts) else STEP
    solved: dict[str, Tensor] = {}
    layers = calibrated_layers(skeleton, start, teachers, device)
    bar = tqdm(layers, "calibrating layers", len(skeleton.model.layers), disable=quiet)
    for place, layer in enumerate(bar):  # kept on the disk, and mapped
        path = work / f"layer-{place}.safetensors"
        moved = {n: torch.lerp(start[n].float(), weight, step) for n, weight in layer.items()}
        save_tensors(path, {n: one.to(merge.stored[n].dtype) for n, one in moved.items()})
        solved |= map_file(path)
    shards = weight_files(Path(merge.folder))
    # The manifest of `mergekit-ace merge` could not resume this.
    left = shutil.ignore_patterns(MANIFEST_FILE, *(shard.name for shard in shards))
    shutil.copytree(merge.folder, work / "result", ignore=left)
    for shard in shards:
        tensors = {
            name: (solved if name in solved else start)[name].to(stored.dtype)
            for name, stored in map_file(shard).items()
        }
        save_tensors(work / "result" / shard.name, tensors, {"format": "pt"})
    with open(work / "result" / "README.md", "a", encoding="utf-8") as card:
        card.write(f"\n\n{_card_section(config, teachers, step, way)}\n")


def _check_weights(model: _Model, skeleton: Any) -> None:
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


def _write_texts(
    writer: _Model, config: CalibrateConfig, tokenizer: Any, path: Path, quiet: bool
) -> DataConfig:
    """Let a model write texts, which is loaded whole for that."""
    options: dict[str, Any] = {"device_map": "auto"} if torch.cuda.is_available() else {}
    model = load_model(writer.folder, KIND, config, **options)
    if writer.adapter:
        for name, parameter in model.named_parameters():
            parameter.copy_(writer[name])
    return write_own_texts(model, tokenizer, SAMPLES, path, quiet=quiet)


def _read_texts(
    data: DataConfig, skeleton: Any, tokenizer: Any, readers: Iterable[_Model]
) -> list[Example]:
    """Return samples, the longest first, whose tokens all readers know."""
    data = fit_to_model(data, skeleton)
    window = getattr(skeleton.config, "sliding_window", None) or math.inf
    cut = {"samples": data.samples or SAMPLES, "max_length": min(data.max_length, window)}
    data = data.model_copy(update=cut)
    rows = cast(Any, read_rows(data, SEED))
    encoded = (KIND.encode(row, data, tokenizer) for row in rows)
    samples = [one for one in encoded if one is not None and len(one["input_ids"]) > 1]
    for sample in samples:
        if not sample["supervised"].any():  # a prompt without an answer counts as a whole
            sample["supervised"] = ~sample["supervised"]
    if not samples:
        raise ConfigError(f"data {data.path} has no text of two tokens or more")
    for reader in readers:
        check_tokens(samples, data, reader.folder, len(reader[TABLE]))
    return sorted(samples, key=lambda one: len(one["input_ids"]), reverse=True)


def comparison_batch(samples: Sequence[Example]) -> Batch:
    """Return samples of medium length, of all by their lengths."""
    medium = samples[len(samples) // 2 :]
    return KIND.collate(medium[: max(1, COMPARED // len(medium[0]["input_ids"]))])


def _card_section(
    config: CalibrateConfig, teachers: Sequence[SampleTeacher], step: float, way: str
) -> str:
    """Return the section of the model card; it names no folder of this machine."""
    rows = ["| texts of | sequences | tokens | from |", "|---|---|---|---|"]
    for (name, data), teacher in zip(config.sources, teachers, strict=True):
        whose = "what should stay" if teacher is teachers[-1] else f"`{PurePath(name).name}`"
        counts = f"{len(teacher.texts)} | {sum(map(len, teacher.texts))}"
        writer = "a model, which wrote them itself" if data is None else "data"
        rows.append(f"| {whose} | {counts} | {writer} |")
    (version,) = package_versions("mergekit-ace").values()
    return (
        f"## Calibration\n\n`mergekit-ace calibrate` (version {version}) then solved every linear "
        "layer of attention and MLP anew, so that it does on some texts of each expert what the "
        f"expert does, and on others what it did before. {way}The ridge was {RIDGE:g}, in mean "
        "eigenvalues of the inputs' covariance, and the weights went "
        f"{'all' if step == 1 else f'{step:g}'} of the way from the merge to the solution.\n\n"
    ) + "\n".join(rows)
