# SPDX-License-Identifier: Apache-2.0
"""A merge as mergekit plans it, with what it leaves out, and what the merge takes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch
from mergekit import merge_methods
from mergekit.architecture import ModelArchitecture, WeightInfo
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConfigReader, InputModelDefinition, MergeConfiguration
from mergekit.graph import Executor
from mergekit.io.tasks import GatherTensors, SaveTensor
from mergekit.merge import _model_out_config
from mergekit.merge_methods import MergeMethod
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.tokenizer import BuildTokenizer
from pydantic import ValidationError
from transformers import PretrainedConfig

from mergekit_ace.architecture import BUFFER, find_architecture
from mergekit_ace.files.checkpoints import (
    DTYPES,
    FLOATING,
    Checkpoint,
    Checkpoints,
    TensorHeader,
    config_donor,
    item_size,
    names_of,
)
from mergekit_ace.merge_config import Finding, MergeConfig, layer_lists, safetensors_dtype
from mergekit_ace.methods.base import TaskVectorMethod, TensorSettings
from mergekit_ace.methods.storage import model_names, tensor_names
from mergekit_ace.naming import ConfigError, in_bytes, is_counter, layer_of, listed, stack_size

Treatment = Literal["base", "merge", "error"]  # of tensors that mergekit does not plan
_WHOLE_NUMBERS = ("int64",)  # dtypes of counters that mergekit reads, which are not merged
_VOCABULARY = re.compile(r"embed|head|wte")
_PROCESS = 700_000_000  # bytes: python with torch, transformers and mergekit


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor of the result, by mergekit's `ExecuteMergeMethodTask`."""

    task: Any

    @property
    def name(self) -> str:
        return self.task.output_weight.name

    @property
    def gather(self) -> GatherTensors:
        """The task that reads it; embeddings may be aligned afterwards."""
        task = self.task.gather_tensors
        return getattr(task, "gather_tensors", task)

    @cached_property
    def weights(self) -> dict[ModelReference, WeightInfo]:
        return dict(self.gather.weight_info.items())

    def headers(self, checkpoints: Checkpoints) -> dict[ModelReference, TensorHeader]:
        """Return the headers of all models that have it."""
        return _stored_headers(self.weights, checkpoints)

    @property
    def base(self) -> ModelReference | None:
        return self.task.base_model

    @cached_property
    def experts(self) -> tuple[ModelReference, ...]:
        return tuple(model for model in self.task.model_order if model != self.base)

    @property
    def method(self) -> MergeMethod:
        return merge_methods.get(self.task.method_name)

    @cached_property
    def settings(self) -> TensorSettings:
        """The tensor's name, models and parameters, as our methods take them."""
        parameters: dict[str, Any] = dict(self.task.parameters.items())
        own = {model: dict(self.task.input_parameters[model].items()) for model in self.experts}
        for parameter in self.method.spec.input_parameters:
            name = parameter.name
            parameters[name] = {model: own[model].get(name) for model in self.experts}
        return TensorSettings(self.name, self.base, self.experts, parameters)


def _stored_headers(
    weights: Mapping[ModelReference, WeightInfo], checkpoints: Checkpoints
) -> dict[ModelReference, TensorHeader]:
    found = {m: checkpoints[m].source(weight) for m, weight in weights.items() if m in checkpoints}
    return {model: header for model, header in found.items() if header is not None}


@dataclass(frozen=True)
class UnplannedTensor:
    """A tensor that goes into the result though mergekit's architecture does not name it."""

    name: str  # in the files of the models, and in the result
    models: tuple[ModelReference, ...]  # whose it is merged from; the only one where it is copied
    merged: bool  # by the config's method; else copied
    vocabulary: bool = False  # whether its rows belong to tokens


@dataclass(frozen=True)
class PlannedMerge:
    """A whole merge."""

    config: MergeConfig
    options: MergeOptions
    architecture: ModelArchitecture
    planner: HeaderPlanner
    saves: Mapping[str, SaveTensor]  # by tensor name; those of `unplanned` come last
    tokenizer_task: BuildTokenizer | None  # builds the result's tokenizer; None: it is only copied
    out_config: PretrainedConfig
    unplanned: tuple[UnplannedTensor, ...] = ()

    @cached_property
    def tensors(self) -> tuple[PlannedTensor, ...]:
        return tuple(PlannedTensor(save.tensor_task) for save in self.saves.values())

    @cached_property
    def method(self) -> MergeMethod:
        return merge_methods.get(self.config.merge_method)

    def named_paths(self, *parameters: str) -> list[str]:
        """Return the paths that parameters of tensors name, each once."""
        settings = [dict(tensor.task.parameters.items()) for tensor in self.tensors]
        values = (setting.get(name) for setting in settings for name in parameters)
        return list(dict.fromkeys(value for value in values if isinstance(value, str)))

    @property
    def vocabulary_multiple(self) -> int | None:
        """What the rows of the result's embeddings are padded to a multiple of."""
        settings = self.config.tokenizer
        return settings.pad_to_multiple_of if settings else None

    def extended(self, tensors: Sequence[UnplannedTensor]) -> PlannedMerge:
        """Return the plan with what is to be merged beside what mergekit plans."""
        saves, names = dict(self.saves), [tensor.name for tensor in tensors]
        first = next(iter(saves.values()))
        for tensor in tensors:
            weight, task = self.planner.plan_unplanned(tensor, names)
            dtype = weight.force_dtype or self.config.out_dtype
            changed = {"tensor_name": tensor.name, "tensor_task": task, "dtype": dtype}
            saves[tensor.name] = first.model_copy(update=changed | {"optional": False})
        return replace(self, saves=saves, unplanned=tuple(tensors))


def plan_merge(
    config: MergeConfig,
    options: MergeOptions,
    checkpoints: Checkpoints | None = None,
) -> PlannedMerge:
    """Plan what `mergekit-yaml` would do, in its order, from configs and headers.

    The models are those that mergekit's loaders have; it opens others, and merges their adapters.

    Args:
        checkpoints: headers of the models, by which tensors keep a dtype that is wider than that of
            the rest; and without which mergekit leaves out what it has to convert in some layers.
    """
    copy = config.model_copy(deep=True)  # planning rewrites the configuration
    architecture = find_architecture(copy.referenced_models(), config_donor(copy), options)
    out = _result_config(copy, architecture, options)
    planner = HeaderPlanner(checkpoints or {}, copy, architecture, options, out)
    try:
        targets = planner.plan_to_disk("")  # only a plan: nothing is written
    except ValidationError as error:
        found = error.errors()[0]  # pydantic's own sentences name neither parameter nor method
        said = f"{config.merge_method} takes no parameter of {found['input']!r:.60}: "
        said = (said if found["type"] != "value_error" else "") + found["msg"]
        raise ConfigError(said.removeprefix("Value error, ")) from error
    except RuntimeError as error:
        text = str(error)
        if "Missing required parameter weight" in text and str(copy.base_model) in text:
            text += (
                f": {config.merge_method} counts the base model among its models; leave "
                "base_model out, or list it under `models:` with a weight of its own"
            )
        elif "same number of layers" in text and not config.slices:
            depths = []
            for model in config.referenced_models():
                settings = model.config(options.trust_remote_code).get_text_config()
                depths.append(f"{model} has {getattr(settings, 'num_hidden_layers', 'some')}")
            text += f": {', '.join(depths)} by config.json; remove the one that differs"
        raise RuntimeError(text) from error
    order = [handle.task() for handle in Executor(targets).schedule.tasks]
    saves = [task for task in order if isinstance(task, SaveTensor)]
    return PlannedMerge(
        config,
        options,
        architecture,
        planner,
        saves={save.tensor_name: save for save in saves},
        tokenizer_task=next((t for t in targets if isinstance(t, BuildTokenizer)), None),
        out_config=out,
    )


def _result_config(
    config: MergeConfiguration, architecture: ModelArchitecture, options: MergeOptions
) -> PretrainedConfig:
    """Return the config of a result as mergekit makes it, with lists as long as its layers."""
    # transformers complains of the name under which mergekit sets the dtype
    plain = config.model_copy(update={"dtype": None, "out_dtype": None})
    result = _model_out_config(plain, architecture, options.trust_remote_code)
    if config.out_dtype or config.dtype:
        result.dtype = config.out_dtype or config.dtype
    if result.architectures == ["Inferred"]:
        donor = ModelReference(model=config_donor(config).model)
        result.architectures = donor.config(options.trust_remote_code).architectures
    vars(result).pop("quantization_config", None)  # what is quantised is merged dequantised
    for name, entries in layer_lists(config, options.trust_remote_code).items():
        setattr(result.get_text_config(), name, entries)
    return result


class HeaderPlanner(MergePlanner):
    """mergekit's planner, which also looks at how the models store a tensor.

    `heads` are those that the base has for another number of labels than an expert.
    """

    def __init__(self, checkpoints: Checkpoints, *planned: Any):
        super().__init__(*planned)
        self.checkpoints, self.heads = checkpoints, list[str]()

    def plan_tensor(
        self,
        weight: WeightInfo,
        weights_in: list[WeightInfo],
        models: list[ModelReference],
        cfg_reader: ConfigReader,
    ) -> None:
        """Plan a tensor as mergekit, but for its dtype, and where it is stored under other names.

        Whole numbers, what no expert has, and heads of classifiers with other numbers of labels
        than the base's are the base's.
        """
        models = models[: len(weights_in)]  # heads go by the first of slices, which may have more
        weights = dict(zip(models, weights_in, strict=False))
        names = ((m, n) for m, w in weights.items() for n in (w.name, *(w.aliases or ())))
        if weight.optional and not any(name in tensor_names(model) for model, name in names):
            return
        headers = _stored_headers(weights, self.checkpoints)
        if dtype := self._own_dtype(weight.name, headers):
            weight = weight.model_copy(update={"force_dtype": dtype})
            weights = {m: w.model_copy(update={"force_dtype": dtype}) for m, w in weights.items()}
        base = self.config.base_model if self.config.base_model in weights else models[0]
        of_base = dtype in _WHOLE_NUMBERS or (weight.optional and list(headers) == [base])
        if len(models) > 1 and self._has_other_labels(headers):
            self.heads.append(weight.name)
            of_base = True
        if len(models) > 1 and of_base:
            self._tensors.append(self.plan_copy(weight, weights[base], base))
            return
        # mergekit's own look for an optional weight fails where it has other names
        present = weight.model_copy(update={"optional": False})
        super().plan_tensor(present, list(weights.values()), models, cfg_reader)
        _, task = self._tensors.pop()
        self._tensors.append((weight, task.model_copy(update={"output_weight": weight})))

    def plan_copy(
        self, weight: WeightInfo, source: WeightInfo, model: ModelReference
    ) -> tuple[WeightInfo, Any]:
        """Plan a tensor that is taken from one model; numbers of tokens are the result's."""
        settings = self.config.tokenizer
        copied = MergeConfiguration(
            merge_method="passthrough",
            models=[InputModelDefinition(model=model)],
            # rows of single tokens may be configured to come from models not asked here
            tokenizer=settings.model_copy(update={"tokens": None}) if settings else None,
        )
        method, self._method = self._method, merge_methods.get(copied.merge_method)
        self.plan_tensor(weight, [source], [model], ConfigReader(config=copied, t=0.0))
        self._method = method
        return self._tensors.pop()

    def plan_unplanned(
        self, tensor: UnplannedTensor, names: Sequence[str]
    ) -> tuple[WeightInfo, Any]:
        """Plan a tensor, of these names, beside what is planned already."""
        weight = WeightInfo(name=tensor.name, vocabulary_axis=0 if tensor.vocabulary else None)
        models = list(tensor.models)
        if not tensor.merged:
            return self.plan_copy(weight, weight, models[0])
        # where in its stack a tensor is, from 0 to 1, as mergekit counts for its gradients
        layer, last = layer_of(tensor.name), stack_size(tensor.name, names) - 1
        depth = 0.0 if layer is None else layer / last if last > 0 else 1.0
        module: Any = next(iter((self.config.modules or {}).values()))
        piece = module.slices[0]
        reader = ConfigReader(config=self.config, t=depth, module=module, slice_out=piece)
        self.plan_tensor(weight, [weight] * len(models), models, reader)
        return self._tensors.pop()

    def _has_other_labels(self, headers: Mapping[ModelReference, TensorHeader]) -> bool:
        """Tell whether a tensor has a row per label of a classifier, and these are not as many."""
        configs = (self.checkpoints[model].config for model in headers)
        labels = [(len(c.get("id2label") or (0, 1)),) for c in configs]  # written unless it is 2
        rows = [header.shape[:1] for header in headers.values()]
        return len(set(labels)) > 1 and rows == labels

    def _own_dtype(self, name: str, headers: Mapping[ModelReference, TensorHeader]) -> str | None:
        """Return the dtype that a tensor keeps: one of whole numbers, or a wider one.

        All models keep routers and state spaces in a wider one than their other tensors.
        """
        if is_counter(name):
            return "int64"
        stored = {header.dtype for header in headers.values()}
        dtype = DTYPES.get(next(iter(stored))) if len(stored) == 1 else None
        if dtype is None:  # they differ, or mergekit does not read it
            return None
        own = str(dtype).removeprefix("torch.")
        if own in _WHOLE_NUMBERS:
            return own
        result = dtype_from_name(self.config.out_dtype or self.config.dtype)
        main = {self.checkpoints[model].main_dtype for model in headers}
        if result is None or not (stored | main) <= set(FLOATING):
            return None
        others = (result, *(DTYPES[name] for name in main))
        wider = all(torch.promote_types(other, dtype) != other for other in others)
        return own if wider else None


def add_unplanned(
    plan: PlannedMerge, checkpoints: Checkpoints, treatment: Treatment
) -> tuple[PlannedMerge, list[Finding]]:
    """Return a plan with what mergekit leaves out of it, and what is to be said of that.

    mergekit leaves out, without a word, vision towers, heads that predict several tokens, norms of
    new architectures, and all of ViT's encoder under the names that it has on the Hub. `treatment`
    is to copy all of it from the model whose config the result has, or to merge what all models
    have.
    """
    donor = checkpoints[config_donor(plan.config)]
    lost = {model: _lost_names(checkpoint, plan) for model, checkpoint in checkpoints.items()}
    own = lost[donor.model]
    foreign = {model: [n for n in names if n not in own] for model, names in lost.items()}
    findings = []
    if any(foreign.values()):
        findings.append(
            Finding.warning(
                f"{donor.model} has no tensors of these names, so the result lacks "
                f"{_describe_lost(foreign)}",
                f"save all models in the same way as {donor.model}, if they are of use",
            )
        )
    if own and treatment == "error":
        findings.append(
            Finding.error(
                f"mergekit plans no merge of {_describe_lost({donor.model: own})}; the result "
                "would lack them",
                "`mergekit-ace merge --unplanned merge` merges them by their names, `--unplanned "
                f"base` copies them from {donor.model}. Or save the models under the names that "
                "they have in memory (save_pretrained(…, save_original_format=False))",
            )
        )
    elif own:
        models = plan.tensors[0].task.model_order
        partial = [n for n in own if any(n not in checkpoints[m].headers for m in models)]
        if partial and treatment == "merge":
            what = _describe_lost({donor.model: partial})
            findings.append(Finding.warning(f"not all models have {what}; copied from there"))
        weights = [t.weights[donor.model] for t in plan.tensors if donor.model in t.weights]
        embeddings = [donor.source(weight) for weight in weights if weight.vocabulary_axis == 0]
        rows = {header.shape[0] for header in embeddings if header}
        extra = []
        for name in own:
            merged = treatment == "merge" and name not in partial
            has_tokens = not rows.isdisjoint(donor.headers[name].shape[:1])
            vocabulary = has_tokens and bool(_VOCABULARY.search(name))
            chosen = models if merged else (donor.model,)
            extra.append(UnplannedTensor(name, chosen, merged, vocabulary))
        plan = plan.extended(extra)
    if plan.planner.heads and treatment != "base":
        findings.append(
            Finding.error(
                "the models have different numbers of labels, so that "
                f"{listed(plan.planner.heads)} cannot be merged",
                f"`mergekit-ace merge --unplanned base` keeps those of {donor.model}",
            )
        )
    return plan, findings


def _lost_names(checkpoint: Checkpoint, plan: PlannedMerge) -> list[str]:
    """Return the tensors of a checkpoint that mergekit does not know, but for buffers.

    It knows all weights of the architecture, also of layers that are not merged.
    """
    model, donor_names = checkpoint.model, model_names(config_donor(plan.config))
    ties = donor_names.ties if donor_names else {}  # names in memory of what is tied
    config = model.config(trust_remote_code=plan.options.trust_remote_code)
    planned = [t.weights[model] for t in plan.tensors if model in t.weights]
    try:
        known = plan.architecture.all_weights(config)
    except RuntimeError:  # of another architecture, see --allow-crimes: the plan has to do
        known = []
    names = {name for weight in (*known, *planned) for name in names_of(weight)}
    return [
        name
        for name, header in checkpoint.headers.items()
        if name not in names
        and not any(name.endswith(key) or key.endswith(name) for key in ties)
        and not BUFFER.search(name)
        and header.dtype.startswith(("F", "BF"))
    ]


def _describe_lost(names: Mapping[ModelReference, Sequence[str]]) -> str:
    """Return which tensors are meant, of which models."""
    tensors = sorted({name for own in names.values() for name in own})
    count = f"{len(tensors)} tensor{'s' * (len(tensors) > 1)}"
    models = [str(model) for model, own in names.items() if own]
    return f"{count} of {listed(models)} ({listed(tensors)})"


@dataclass(frozen=True)
class MergeEstimate:
    """What a merge takes, if all experts have changed all tensors and all of them are refined."""

    operations: float  # of floating-point numbers
    memory: int  # bytes of the process at its largest, about; without what the system caches
    device_memory: int | None  # bytes on the accelerator; None without one
    read: int  # bytes
    written: int

    @property
    def text(self) -> str:
        device = self.device_memory
        more = f", and {in_bytes(device)} on the device" if device is not None else ""
        return (
            f"  work  up to {self.operations:.2g} operations\n"
            f"memory  about {in_bytes(self.memory)}{more}\n"
            f"  disk  reads {in_bytes(self.read)}, writes {in_bytes(self.written)}"
        )


def estimate_merge(plan: PlannedMerge, checkpoints: Checkpoints) -> MergeEstimate:
    """Return what a merge takes, from the shapes of its tensors."""
    config, on_device = plan.config, plan.options.device not in (None, "cpu")
    operations, read, written = 0.0, 0, 0
    most = most_on_device = shard = 0  # bytes; a shard is held until the next tensor would fill it
    for tensor in plan.tensors:
        headers = tensor.headers(checkpoints)
        header = headers.get(tensor.base) if tensor.base else next(iter(headers.values()), None)
        if header is None:
            continue
        method, settings = tensor.method, tensor.settings
        working = 8 * header.entries  # with the result in float32
        operations += 2.0 * header.entries * max(1, len(headers) - 1)
        if isinstance(method, TaskVectorMethod):
            if method.layouts:
                settings = replace(settings, layout=method.layout(settings, len(header.shape)))
            weights = zip(settings.experts, settings.weights, strict=True)
            experts = sum(weight != 0 for model, weight in weights if model in headers)
            working = method.memory(settings, header.shape, experts) + 4 * header.entries
            operations += method.operations(settings, header.shape, experts)
        merged_in = safetensors_dtype(tensor.gather.dtype or config.dtype) or header.dtype
        output = header.entries * item_size(safetensors_dtype(config.out_dtype) or merged_in)
        inputs = len(headers) * header.entries * item_size(merged_in)
        shard = 0 if 0 < plan.options.out_shard_size < shard + output else shard
        most = max(most, shard + inputs + output + (0 if on_device else working))
        shard += output
        most_on_device = max(most_on_device, inputs + working)
        # adapters share a base, which is read once
        read += sum(one.bytes for one in {m.model: h for m, h in headers.items()}.values())
        written += output
    device = most_on_device if on_device else None
    return MergeEstimate(operations, _PROCESS + most, device, read, written)
