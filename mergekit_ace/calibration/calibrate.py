# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace calibrate`: λ of a merge, and its linear layers solved anew on samples.

Teachers and the merge read the same samples, each in a stream of its own: see the README.
"""

from __future__ import annotations

import copy
import math
import os
import shutil
from collections import UserDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path, PurePath
from statistics import fmean
from typing import Annotated, Any, ClassVar, TypeAlias, cast

import click
import torch
from accelerate.hooks import attach_align_device_hook, remove_hook_from_submodules
from mergekit.common import ModelReference
from pydantic import Field, model_validator
from torch import Tensor, nn
from tqdm import tqdm
from transformers import LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM

from mergekit_ace.adapters.read import read_adapters
from mergekit_ace.check.check import DEQUANTISE
from mergekit_ace.files.checkpoints import weight_files
from mergekit_ace.files.saving import check_apart, locked, occupied, package_versions, save_tensors
from mergekit_ace.merging.output import MANIFEST_FILE
from mergekit_ace.methods.base import is_finite
from mergekit_ace.naming import ConfigError
from mergekit_ace.training import models, tasks
from mergekit_ace.training.config import DataConfig, ExpertConfig, Strict, Task
from mergekit_ace.training.data import check_tokens, read_rows

KIND = tasks.CausalLanguageModel()
# λ of what is already merged: finer where merges are usually best.
SCALES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0, 1.2, 1.4, 1.7, 2.0)
RIDGE = 1.0  # λ of the linear layers
# Models whose layers work as `decoder_steps` has it.
KNOWN_MODELS = (LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM)
# Linear layers with the same input, in the order of the forward pass.
GROUPS = (
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    ("self_attn.o_proj",),
    ("mlp.gate_proj", "mlp.up_proj"),
    ("mlp.down_proj",),
)
WRITERS = ("self_attn.o_proj", "mlp.down_proj")  # to the residual stream
TABLE, HEAD = "model.embed_tokens.weight", "lm_head.weight"
Weights: TypeAlias = Mapping[str, Tensor]
Rotary: TypeAlias = tuple[Tensor, Tensor]
Step: TypeAlias = tuple[Tensor, Tensor]  # what layers read, (n, length, i), and the stream there
# Share of the way from the merge to the solution that weights go. Of full fine-tunes, half of it
# gains nearly as much on held-out texts, and spares other texts; adapters gain more by all of it.
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


class LazyWeights(UserDict[str, Tensor]):
    """Weights of a model by name, computed when they are asked for."""

    def __init__(self, names: Iterable[str], read: Callable[[str], Tensor]):
        super().__init__()
        self.data |= dict.fromkeys(names)  # type: ignore
        self._read = read

    def __getitem__(self, name: str) -> Tensor:
        return self._read(name)


class _Model(LazyWeights):
    """A model whose tensors are mapped; an adapter's changes are added when they are read."""

    def __init__(self, reference: str, trust_remote_code: bool):
        parsed = ModelReference.model_validate(reference)
        self.reference = reference
        self.folder = models.local_folder(str(parsed.model), Path(), trust_remote_code)
        self.stored = models.map_folder(self.folder)
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
    work, former = partial / "work", partial / "former"  # the old result waits for the new one
    names = (config.merged_model, config.base_model, *(one.model for one in config.models))
    data = [one.path for _, one in config.sources if one is not None]
    check_apart([*models.model_paths(filter(None, names)), *data], [out, partial])
    with locked(partial):
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir()
        try:
            _calibrate(config, work, quiet)
            if out.exists():
                shutil.rmtree(former, ignore_errors=True)
                os.replace(out, former)
            os.replace(work / "result", out)
        finally:
            if former.exists() and not out.exists():
                os.replace(former, out)
            shutil.rmtree(partial, ignore_errors=True)


def _calibrate(config: CalibrateConfig, work: Path, quiet: bool) -> None:
    """Write the calibrated merge to the folder `result` in a folder for what is unfinished."""
    trust = config.trust_remote_code
    merge = _Model(config.merged_model, trust)
    experts = [_Model(expert.model, trust) for expert in config.models]
    base = _Model(config.base_model, trust) if config.base_model else None
    skeleton: Any = models.load_skeleton(merge.folder, KIND, config)
    if type(skeleton) not in KNOWN_MODELS:
        known = ", ".join(kind.__name__ for kind in KNOWN_MODELS)
        raise ConfigError(f"{type(skeleton).__name__} cannot be calibrated, only {known}")
    for model in (merge, *experts, base or merge):
        _check_weights(model, skeleton)
    folders = [one.folder for one in (merge, *experts)]
    tokenizer = models.load_processor(folders, KIND, config, grown=True)
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
        medium = [own[len(own) // 2 :] for own in samples[:-1]]  # of all by their lengths
        few = [own[: max(1, COMPARED // len(own[0]["input_ids"]))] for own in medium]
        compared = list(zip(experts, map(KIND.collate, few), strict=True))
        scale, share, before = choose_scale(skeleton, base, merge, compared, device)
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
        solved |= models.map_file(path)
    shards = weight_files(Path(merge.folder))
    # The manifest of `mergekit-ace merge` could not resume this.
    left = shutil.ignore_patterns(MANIFEST_FILE, *(shard.name for shard in shards))
    shutil.copytree(merge.folder, work / "result", ignore=left)
    for shard in shards:
        stored = models.map_file(shard).items()
        tensors = {n: (solved if n in solved else start)[n].to(one.dtype) for n, one in stored}
        save_tensors(work / "result" / shard.name, tensors, {"format": "pt"})
    with open(work / "result" / "README.md", "a", encoding="utf-8") as card:
        card.write(f"\n\n{_card_section(config, teachers, step, way)}\n")


def _check_weights(model: _Model, skeleton: Any) -> None:
    """Raise unless a model stores the decoder layers of the merge under the merge's names."""
    for name, parameter in skeleton.named_parameters():
        own, first = model.stored.get(name), int(name == TABLE)  # of which some have more rows
        if name != TABLE and not name.startswith("model.layers."):
            continue
        if own is None or own.shape[first:] != parameter.shape[first:]:
            raise ConfigError(
                f"the tensor {name} of {model.reference} is missing, or not of the merge's shape "
                f"{tuple(parameter.shape)}; give the experts that were merged"
            )
        if own.dtype.itemsize < 2:
            raise ConfigError(f"model {model.reference} is quantised; {DEQUANTISE}")


def _write_texts(
    writer: _Model, config: CalibrateConfig, tokenizer: Any, path: Path, quiet: bool
) -> DataConfig:
    """Let a model write texts, which is loaded whole for that."""
    options: dict[str, Any] = {"device_map": "auto"} if torch.cuda.is_available() else {}
    model = models.load_model(writer.folder, KIND, config, **options)
    if writer.adapter:
        for name, parameter in model.named_parameters():
            parameter.copy_(writer[name])
    return tasks.write_own_texts(model, tokenizer, SAMPLES, path, quiet=quiet)


def _read_texts(
    data: DataConfig, skeleton: Any, tokenizer: Any, readers: Iterable[_Model]
) -> list[tasks.Example]:
    """Return samples, the longest first, whose tokens all readers know."""
    data = tasks.fit_to_model(data, skeleton)
    window = getattr(skeleton.config, "sliding_window", None) or math.inf
    cut: Any = {"samples": data.samples or SAMPLES, "max_length": min(data.max_length, window)}
    if data.prompt and not data.completion:  # it counts as a text
        cut |= {"text": data.prompt, "prompt": None}
    data = data.model_copy(update=cut)
    encoded = (KIND.encode(row, data, tokenizer) for row in cast(Any, read_rows(data, SEED)))
    samples = [one for one in encoded if one is not None and len(one["input_ids"]) > 1]
    for sample in samples:  # a chat without an answer counts as a whole
        sample["supervised"] |= ~sample["supervised"].any()
    if not samples:
        raise ConfigError(f"data {data.path} has no text of two tokens or more")
    for reader in readers:
        check_tokens(samples, data, reader.folder, len(reader[TABLE]))
    return sorted(samples, key=lambda one: len(one["input_ids"]), reverse=True)


def _card_section(
    config: CalibrateConfig, teachers: Sequence[SampleTeacher], step: float, way: str
) -> str:
    """Return the section of the model card; it names no folder of this machine."""
    rows = ["| texts of | sequences | tokens | from |", "|---|---|---|---|"]
    for (name, data), teacher in zip(config.sources, teachers, strict=True):
        whose = "what should stay" if teacher is teachers[-1] else f"`{PurePath(name).name}`"
        counts = f"{len(teacher.texts)} | {sum(map(len, teacher.texts))}"
        rows.append(f"| {whose} | {counts} | {'data' if data else 'the model itself'} |")
    (version,) = package_versions("mergekit-ace").values()
    return (
        f"## Calibration\n\n`mergekit-ace calibrate` (version {version}) then solved every linear "
        "layer of attention and MLP anew, so that it does on texts of each expert what the expert "
        f"does, and on others what it did before. {way}The weights went "
        f"{'all' if step == 1 else f'{step:g}'} of the way from the merge to the solution.\n\n"
    ) + "\n".join(rows)


def scaled_weights(base: Weights, merged: Weights, scale: float) -> LazyWeights:
    """Return the weights W0 + λ (M − W0).

    Tensors and rows of embeddings that the base lacks are as in M. Where a model stores no head,
    its embeddings are that, too.
    """

    def read(name: str) -> Tensor:
        if name == HEAD and HEAD not in merged:
            name = TABLE
        own, other = merged[name], base.get(TABLE if name == HEAD and HEAD not in base else name)
        if other is None or not own.is_floating_point() or scale == 1.0:
            return own
        scaled = own.to(torch.float32, copy=True)
        rows = slice(0, min(len(other), len(own))) if own.ndim else ...
        scaled[rows] = torch.lerp(other[rows].float(), scaled[rows], scale)
        return scaled

    return LazyWeights(merged, read)


def choose_scale(
    model: nn.Module, base: Weights, merged: Weights,
    experts: Sequence[tuple[Weights, tasks.Batch]], device: torch.device,
) -> tuple[float, float, float]:  # fmt: skip
    """Return λ of the merge, and how far it goes from the base to the experts with it and as it is.

    That is the mean over experts of 1 − KL(p_t ‖ p_λ) / KL(p_t ‖ p_0), with p the distributions of
    the next token on the texts of the expert. From 1 on, neighbours of `SCALES` are tried as long
    as they are better.
    Of `model`, the architecture, no weights are used; experts are their weights and some texts.
    """
    model = copy.deepcopy(model).float().eval()
    targets = []
    for weights, batch in experts:
        shaped = scaled_weights(weights, merged, 0.0)  # with as many rows of embeddings
        targets.append(_log_probabilities(model, shaped, batch, device).half())

    def divergences(scale: float) -> list[float]:
        """Return KL(expert ‖ merge with a λ), summed over tokens, on the texts of each expert."""
        weights, found = scaled_weights(base, merged, scale), []
        for (_, batch), target in zip(experts, targets, strict=True):
            wanted, now = target.float(), _log_probabilities(model, weights, batch, device)
            found.append(float((wanted.exp() * (wanted - now)).sum()))
        return found

    whole = divergences(0.0)

    @lru_cache
    def share(place: int) -> float:
        pairs = zip(divergences(SCALES[place]), whole, strict=True)
        return fmean(1.0 - now / max(before, 1e-6) for now, before in pairs)

    start = best = SCALES.index(1.0)
    for step in (-1, 1):
        while 0 <= best + step < len(SCALES) and share(best + step) > share(best):
            best += step
    return SCALES[best], share(best), share(start)


@torch.no_grad()
def _log_probabilities(
    model: Any, weights: Weights, batch: tasks.Batch, device: torch.device
) -> Tensor:
    """Return log p before supervised tokens, (P, vocabulary); one layer is in memory at a time."""
    attach_align_device_hook(model, device, offload=True, weights_map=weights)
    try:
        logits = KIND.logits(model, {name: one.to(device) for name, one in batch.items()})
    finally:
        remove_hook_from_submodules(model)
    return logits.log_softmax(dim=-1)


def decoder_steps(layer: Any, hidden: Tensor, rotary: Rotary) -> Iterator[Step]:
    """Run a layer of one of `KNOWN_MODELS` on its input, (n, length, features).

    Stops before each of `GROUPS`, whose weights may be replaced meanwhile. The last step is the
    output of the layer, twice.
    """
    inputs = layer.input_layernorm(hidden)
    yield inputs, hidden
    attention, seen = layer.self_attn, []
    hook = attention.o_proj.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    attention(hidden_states=inputs, position_embeddings=rotary, attention_mask=None)
    hook.remove()
    (mixed,) = seen
    yield mixed, hidden
    hidden = hidden + attention.o_proj(mixed)
    inputs = layer.post_attention_layernorm(hidden)
    yield inputs, hidden
    gated = layer.mlp.act_fn(layer.mlp.gate_proj(inputs)) * layer.mlp.up_proj(inputs)
    yield gated, hidden
    hidden = hidden + layer.mlp.down_proj(gated)
    yield hidden, hidden


@dataclass
class _Streams:
    """Some texts of a teacher, and what it and the merge make of them, (n, length, features)."""

    tokens: Tensor  # (n, length): where there is no padding
    rotary: Rotary
    merged: Tensor
    own: Tensor
    steps: tuple[Iterator[Step], ...] = ()  # of the layer that the merge and the teacher are in


class SampleTeacher:
    """A model that says what the merge should do on some texts; both read them side by side."""

    layer: Any  # of the teacher, that both have come to

    def __init__(self, weights: Weights, texts: Sequence[Tensor], weight: float):
        """Take the tokens of texts, (length,) each, and w_t > 0."""
        self.weights, self.texts, self.weight = weights, texts, weight
        self.batches: list[_Streams] = []

    def begin(self, model: Any, merged: Weights, device: torch.device) -> None:
        """Look up all tokens in the tables of both models."""
        turn = copy.deepcopy(model.model.rotary_emb).to(device)
        tables = merged[TABLE], self.weights[TABLE]
        for places in tasks.batches_by_length(self.texts, device):
            # Padded at the end, where causal attention does not see it.
            batch = KIND.collate([{"input_ids": self.texts[place]} for place in places])
            ids, tokens = batch["input_ids"], batch["attention_mask"].bool().to(device)
            rows = [table[ids].float().to(device) for table in tables]
            rotary = turn(rows[0], torch.arange(ids.shape[1], device=device)[None])
            self.batches.append(_Streams(tokens, rotary, rows[0], rows[1]))

    def enter(self, merge: nn.Module, own: nn.Module) -> None:
        """Come to a decoder layer of both models."""
        self.layer = own
        for one in self.batches:
            ours = decoder_steps(merge, one.merged, one.rotary)
            one.steps = (ours, decoder_steps(own, one.own, one.rotary))

    def step(self) -> list[list[Step]]:
        """Return the next steps of the merge and of the teacher, by batch; on a GPU by bfloat16."""
        kind = self.batches[0].merged.device.type
        with torch.autocast(kind, torch.bfloat16, enabled=kind == "cuda"):
            return [[next(steps) for steps in one.steps] for one in self.batches]

    def leave(self) -> None:
        """Take what the layers return for the streams."""
        for batch, (ours, theirs) in zip(self.batches, self.step(), strict=True):
            batch.merged, batch.own = ours[0], theirs[0]


@torch.no_grad()
def calibrated_layers(
    model: Any, start: Weights, teachers: Sequence[SampleTeacher], device: torch.device
) -> Iterator[Weights]:
    """Calibrate one decoder layer of a merge after the other; yield new weights, in float32.

    Of `model`, the architecture, no weights are looked at. One layer is in memory at a time.
    """
    model.set_attn_implementation("sdpa")  # which is causal without a mask
    for teacher in teachers:
        teacher.begin(model, start, device)
    for place in range(len(model.model.layers)):
        merge = _load_layer(model, place, start, device)
        for teacher in teachers:
            teacher.enter(merge, _load_layer(model, place, teacher.weights, device))
        for group in GROUPS:
            _solve(group, merge, teachers)
        for teacher in teachers:
            teacher.leave()
        names = [f"{name}.weight" for group in GROUPS for name in group]
        yield {f"model.layers.{place}.{n}": merge.get_parameter(n).cpu() for n in names}


def _load_layer(model: Any, place: int, weights: Weights, device: torch.device) -> nn.Module:
    """Return a decoder layer with weights, in float32."""
    layer = copy.deepcopy(model.model.layers[place]).to_empty(device=device).float().eval()
    prefix = f"model.layers.{place}."
    layer.load_state_dict({name: weights[prefix + name] for name in layer.state_dict()})
    return layer


def _solve(group: tuple[str, ...], merge: nn.Module, teachers: Sequence[SampleTeacher]) -> None:
    """Replace W_m of a group in the merge's layer by W_m + (K − W_m C) (C + λ s̄ I)⁻¹.

    C = Σ_t w_t X_tᵀX_t / n_t, (i, i), has the mean eigenvalue s̄, and K = Σ_t w_t Y_tᵀX_t / n_t,
    (o, i), is that of each linear layer; both in float64.
    """
    linears: list[Any] = [merge.get_submodule(name) for name in group]
    writes, bias = group[0] in WRITERS, linears[0].bias
    gram, *crosses = [cast(Any, 0.0)] * (1 + len(group))
    for teacher in teachers:
        rows = [
            (ours[0][one.tokens], theirs[0][one.tokens], (theirs[1] - ours[1])[one.tokens])
            for one, (ours, theirs) in zip(teacher.batches, teacher.step(), strict=True)
        ]
        inputs, outer, back = (torch.cat(part).float() for part in zip(*rows, strict=True))
        own = [teacher.layer.get_submodule(name) for name in group]
        if writes:
            outer = own[0](outer) + back - (0 if bias is None else bias)
        share = teacher.weight / len(inputs)
        gram = gram + share * (inputs.mT @ inputs).double()
        product = share * (outer.mT @ inputs).double()
        for n, linear in enumerate(own):  # Y_t = X W_tᵀ; biases stay those of the merge
            crosses[n] = crosses[n] + (product if writes else linear.weight.double() @ product)
        if not all(map(is_finite, (gram, *crosses))):
            whose = getattr(teacher.weights if is_finite(gram) else 0, "reference", "the merge")
            raise ConfigError(f"{whose} answers NaN or Inf to a text; give another one")
    ridged = gram.clone()
    # Inputs that are all zero leave nothing to invert; any positive number then keeps the start.
    ridged.diagonal().add_(RIDGE * gram.diagonal().mean().clamp_min(1e-30))
    factor = torch.linalg.cholesky(ridged)
    for linear, cross in zip(linears, crosses, strict=True):
        start = linear.weight.double()
        linear.weight.copy_(start + torch.cholesky_solve((cross - start @ gram).mT, factor).mT)
