# SPDX-License-Identifier: Apache-2.0
"""A merge as mergekit itself plans it: which tensors of which models, with which parameters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch
import yaml
from mergekit import merge_methods
from mergekit.architecture import ModelArchitecture, WeightInfo
from mergekit.common import ModelReference, dtype_from_name
from mergekit.config import ConfigReader, InputModelDefinition, MergeConfiguration
from mergekit.graph import Executor
from mergekit.io.tasks import GatherTensors, LoaderCache, SaveTensor, TensorWriterTask
from mergekit.merge import _model_out_config
from mergekit.merge_methods import MergeMethod
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.tokenizer import BuildTokenizer
from pydantic import BaseModel, PrivateAttr, ValidationError
from transformers import PretrainedConfig

from mergekit_ace.algebra.task_vectors import FixedLayout
from mergekit_ace.files.checkpoints import DTYPES, FLOATING, TensorHeader
from mergekit_ace.files.models import Checkpoints, config_donor
from mergekit_ace.methods.architecture import find_architecture, stored_layout
from mergekit_ace.methods.base import TaskVectorMethod, TensorSettings
from mergekit_ace.naming import ConfigError, is_counter, layer_of, stack_size

M = TypeVar("M", bound=BaseModel)
# The command that takes a config, by a key that tells its kind; the first that is there counts.
_COMMANDS = {
    "merge_method": "merge",
    "teacher": "distill",
    "merges": "score",
    "search": "search",
    "merged_model": "calibrate",
    "measure": "statistics",
    "task": "train",
}
_WHOLE_NUMBERS = ("int64", "int32", "bool")  # dtypes of counters and masks, which are not merged
# Settings of transformers' configs with an entry per layer.
_LAYER_LISTS = ("layer_types", "mlp_layer_types", "no_rope_layers")
# What to write where mergekit reads another type, by key.
_EXPECTED = {
    "tokenizer": "write `tokenizer: {source: base}`",
    "models": "write a list of lines `- model: PATH`",
    "parameters": "write lines `name: value` below it",
}


class UniqueKeyLoader(yaml.SafeLoader):
    """Reads YAML, and refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """Raise a `YAMLError` for a key of which YAML would take the last value."""
        lines: dict[str, int] = {}
        for key, _ in node.value:
            name, line = str(key.value), key.start_mark.line + 1
            if name in lines and name != "<<":
                raise yaml.YAMLError(
                    f"the key {name!r} stands in line {lines[name]} and again in line {line}; "
                    "remove one of them"
                )
            lines[name] = line
        return super().construct_mapping(node, deep)


def read_yaml(path: Path) -> tuple[Any, str]:
    """Return the content of a YAML file, and its text."""
    try:
        source = path.read_text(encoding="utf-8")
        documents = list(yaml.load_all(source, UniqueKeyLoader))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as YAML: {error}") from error
    if len(documents) > 1:
        raise ConfigError(f"{path} is a file of several merge configs, which mergekit-multi takes")
    return documents[0] if documents else None, source


def validate_config(path: Path, content: Any, kind: type[M]) -> M:
    """Return the content of a config file as settings; a `ConfigError` names all that is wrong."""
    found = [key for key in _COMMANDS if isinstance(content, dict) and key in content]
    if found and found[0] not in kind.model_fields:
        raise ConfigError(f"{path} is a config for `mergekit-ace {_COMMANDS[found[0]]}`")
    try:
        return kind.model_validate(content)
    except ValidationError as error:
        lines = [f"{path}:", *_explain(error, content)]
        raise ConfigError("\n    ".join(lines)) from error
    except RuntimeError as error:  # of mergekit's own validators
        raise ConfigError(f"{path}: {error}") from error


class MergeConfig(MergeConfiguration):
    """A configuration from a file, which lists its models in an order that is no chance."""

    _source: str = PrivateAttr("")

    @property
    def source(self) -> str:
        """The text of the file."""
        return self._source

    def referenced_models(self) -> list[ModelReference]:
        """Return all models, in the order of their names."""
        return sorted(super().referenced_models(), key=str)


def read_merge_config(path: Path) -> MergeConfig:
    """Return a mergekit configuration, or raise a `ConfigError`."""
    content, source = read_yaml(path)
    config = validate_config(path, content, MergeConfig)
    config._source = source
    return config


def _explain(error: ValidationError, content: Any) -> list[str]:
    """Return what is wrong, once for every place in a config: pydantic tells every alternative."""
    told: dict[tuple[str, ...], str] = {}
    for detail in error.errors():
        places, what = detail["loc"], detail["msg"].removeprefix("Value error, ")
        if detail["type"] == "missing":
            what = f"there is no `{places[-1]}:`"
        if detail["type"] == "extra_forbidden":
            what = "there is no such setting"
        if "parameters" in places[:-1]:
            places = places[: places.index("parameters") + 2]
            what = "a parameter is a value, a list of values, or a list of {filter: …, value: …}"
        path, found = find_place(places, content)
        if path and path[-1] in _EXPECTED:
            what = f"{what}; {_EXPECTED[path[-1]]}"
        told.setdefault(path, f"{'.'.join(path) or 'the config'}: {what} (found: {found!r:.60})")
    return list(told.values())


def find_place(places: Sequence[str | int], content: Any) -> tuple[tuple[str, ...], Any]:
    """Return a path without pydantic's names for one of several alternatives, and what is there."""
    path = []
    for place in places:
        if isinstance(content, str):  # given where a list of one was meant
            break
        try:
            content = content[place]
        except (LookupError, TypeError):
            continue
        path.append(str(place))
    return tuple(path), content


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

    def layout(self, ndim: int) -> FixedLayout:
        """Return how this tensor of so many axes is read; by mergekit's own methods as by ours."""
        if isinstance(self.method, TaskVectorMethod):
            return self.method.layout(self.settings, ndim)
        return stored_layout("auto", self.base, self.name, ndim)


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
        writer = next(iter(self.saves.values())).writer_task
        more = {one.tensor_name: one for one in _plan_unplanned(self.planner, tensors, writer)}
        return replace(self, saves={**self.saves, **more}, unplanned=tuple(tensors))


def plan_merge(
    config: MergeConfig,
    options: MergeOptions,
    checkpoints: Checkpoints | None = None,
    *,
    as_run: bool = False,
) -> PlannedMerge:
    """Plan what `mergekit-yaml` would do, from configs and headers.

    The models are those that mergekit's loaders have; it opens others, and merges their adapters.

    Args:
        checkpoints: headers of the models, by which tensors keep a dtype that is wider than that of
            the rest; and without which mergekit leaves out what it has to convert in some layers.
        as_run: order tensors as mergekit would merge them, not as the architecture has them.
    """
    LoaderCache().setup(options)
    copy = config.model_copy(deep=True)  # planning rewrites the configuration
    architecture = find_architecture(copy.referenced_models(), config_donor(copy), options)
    out = _result_config(copy, architecture, options)
    planner = HeaderPlanner(copy, architecture, options, out, checkpoints or {})
    try:
        targets = planner.plan_to_disk("")  # only a plan: nothing is written
    except RuntimeError as error:
        text, remedy = str(error), ""
        if "Missing required parameter weight" in text and str(copy.base_model) in text:
            remedy = (
                f": {config.merge_method} counts the base model among its models; leave "
                "base_model out, or list it under `models:` with a weight of its own"
            )
        elif "same number of layers" in text and not config.slices:
            depths = []
            for model in config.referenced_models():
                settings = model.config(options.trust_remote_code).get_text_config()
                depths.append(f"{model} has {getattr(settings, 'num_hidden_layers', 'some')}")
            remedy = f": {', '.join(depths)} by config.json; remove the one that differs"
        raise RuntimeError(text + remedy) from error
    order = [handle.task() for handle in Executor(targets).schedule.tasks] if as_run else targets
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


def layer_lists(config: MergeConfiguration, trust_remote_code: bool) -> dict[str, list[Any]]:
    """Return the settings with an entry per layer that the result of a merge in slices has to have.

    mergekit leaves the base's there, and transformers saves no config that contradicts itself.
    """
    found: dict[str, list[Any]] = {}
    for piece in config.slices or ():
        source = piece.sources[0]
        settings = source.model.config(trust_remote_code=trust_remote_code).get_text_config()
        for name in _LAYER_LISTS:
            entries = getattr(settings, name, None)
            if isinstance(entries, list):
                found.setdefault(name, []).extend(entries[slice(*source.layer_range)])
    return found


class HeaderPlanner(MergePlanner):
    """mergekit's planner, which also looks at how the models store a tensor.

    `heads` are those that the base has for another number of labels than an expert.
    """

    def __init__(
        self,
        config: MergeConfiguration,
        architecture: ModelArchitecture,
        options: MergeOptions,
        out_config: PretrainedConfig,
        checkpoints: Checkpoints,
    ):
        super().__init__(config, architecture, options, out_config)
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
        weights = dict(zip(models, weights_in, strict=True))
        if weight.optional and not any(map(_is_stored, models, weights_in)):
            return
        headers = _stored_headers(weights, self.checkpoints)
        dtype = self._own_dtype(weight.name, headers)
        if dtype:
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

    def _has_other_labels(self, headers: Mapping[ModelReference, TensorHeader]) -> bool:
        """Tell whether a tensor has a row per label of a classifier, and these are not as many."""
        labels = [(self.checkpoints[model].labels,) for model in headers]
        rows = [header.shape[:1] for header in headers.values()]
        return len(set(labels)) > 1 and rows == labels

    def _own_dtype(self, name: str, headers: Mapping[ModelReference, TensorHeader]) -> str | None:
        """Return the dtype that a tensor keeps: one of whole numbers, or a wider one.

        All models keep routers and state spaces in a wider one than their other tensors.
        """
        if is_counter(name):
            return "int64"
        stored = {header.dtype for header in headers.values()}
        if len(stored) != 1:
            return None
        dtype = DTYPES[next(iter(stored))]
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


def _is_stored(model: ModelReference, weight: WeightInfo) -> bool:
    stored = LoaderCache().get(model).index.tensor_paths
    return any(name in stored for name in (weight.name, *(weight.aliases or ())))


def _plan_unplanned(
    planner: HeaderPlanner, tensors: Sequence[UnplannedTensor], writer: TensorWriterTask
) -> Iterator[SaveTensor]:
    """Yield mergekit's tasks for tensors that a planner, which has planned the merge, has not."""
    names = [tensor.name for tensor in tensors]
    module: Any = next(iter((planner.config.modules or {}).values()))
    for tensor in tensors:
        weight = WeightInfo(name=tensor.name, vocabulary_axis=0 if tensor.vocabulary else None)
        models = list(tensor.models)
        if tensor.merged:
            # where in its stack a tensor is, from 0 to 1, as mergekit counts for its gradients
            layer, last = layer_of(tensor.name), stack_size(tensor.name, names) - 1
            depth = 0.0 if layer is None else layer / last if last > 0 else 1.0
            reader = ConfigReader(
                config=planner.config, t=depth, module=module, slice_out=module.slices[0]
            )
            planner.plan_tensor(weight, [weight] * len(models), models, reader)
            weight, task = planner._tensors.pop()
        else:
            weight, task = planner.plan_copy(weight, weight, models[0])
        yield SaveTensor(
            tensor_name=tensor.name,
            tensor_task=task,
            writer_task=writer,
            clone=planner.options.clone_tensors,
            dtype=weight.force_dtype or planner.config.out_dtype,
        )
