# SPDX-License-Identifier: Apache-2.0
"""What adapters change of each tensor, and a merge of them planned without a weight of the base."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

from mergekit import merge_methods
from mergekit.architecture import ModelArchitecture, WeightInfo
from mergekit.common import ModelReference
from mergekit.config import InputModelDefinition, InputSliceDefinition, MergeConfiguration
from mergekit.io import ShardedTensorIndex
from mergekit.io.tasks import LoaderCache
from mergekit.merge_methods import BasePolicy
from mergekit.options import MergeOptions
from torch import Tensor, nn

from mergekit_ace.adapters.read import (
    Adapter,
    Change,
    adapter_folder,
    read_adapter,
    read_lora_config,
)
from mergekit_ace.algebra.low_rank import LowRank
from mergekit_ace.files.checkpoints import check_name, existing_folder
from mergekit_ace.files.headers import DamagedFileError, TensorHeader
from mergekit_ace.files.models import DTYPE_NAMES, Checkpoint, headers_only
from mergekit_ace.methods.architecture import empty_network
from mergekit_ace.naming import listed, same_name
from mergekit_ace.planning import (
    ConfigError,
    PlannedMerge,
    PlannedTensor,
    UnplannedTensor,
    find_architecture,
    plan_merge,
)

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class AdaptedTensor:
    """What adapters change of one tensor.

    Attributes:
        changes: by the adapter's model; None of one that leaves the tensor as it is.
    """

    changes: Mapping[ModelReference, tuple[Adapter, Change | None]]

    @property
    def known(self) -> list[Change]:
        """All changes, the first of which tells what kind of tensor it is."""
        return [change for _, change in self.changes.values() if change is not None]

    def product(self, model: ModelReference) -> LowRank | None:
        """Return the change of a model as factors in float64; None where it changes nothing.

        Raises:
            DamagedFileError: a factor holds NaN or infinite numbers.
        """
        adapter, change = self.changes.get(model, (None, None))
        return adapter.low_rank(change.name) if adapter and change else None

    def version(self, model: ModelReference, base: Tensor) -> Tensor:
        """Return the tensor of a model, in the dtype of the base's; that itself where it is equal.

        Raises:
            DamagedFileError: the adapter holds NaN or infinite numbers.
        """
        adapter, change = self.changes.get(model, (None, None))
        if adapter is None or change is None:
            return base
        if change.kind == "saved":
            return adapter.full(change.name).to(base.device, base.dtype)
        return adapter.low_rank(change.name).added_to(base)


@dataclass(frozen=True)
class ChangedTensor(AdaptedTensor):
    """A tensor of the base that at least one of the merged adapters changes."""

    planned: PlannedTensor


@dataclass(frozen=True)
class AdapterPlan:
    """A merge of adapters.

    Attributes:
        base: the model that all adapters belong to.
        adapters: in the order of the experts.
        checkpoints: of all models, as they would be.
    """

    merge: PlannedMerge
    base: ModelReference
    adapters: tuple[Adapter, ...]
    tensors: tuple[ChangedTensor, ...]
    checkpoints: tuple[Checkpoint, ...]


def read_adapters(models: Iterable[ModelReference]) -> dict[ModelReference, Adapter]:
    """Read the adapters of models that have one, by configs and headers.

    Raises:
        DamagedFileError: what is wrong with an adapter.
        ConfigError: transformers does not know the architecture of a base.
    """
    return {
        model: read_adapter(model.lora, _base_network(base_of(model)))
        for model in models
        if model.lora
    }


@lru_cache(maxsize=4)  # it takes a second, and is asked for again and again
def _base_network(base: ModelReference) -> nn.Module:
    """Return a base without weights."""
    try:
        return empty_network(base)
    except Exception as error:  # of transformers: no config, an unknown architecture, no network
        first = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"the config of the base model {base} cannot be used ({type(error).__name__}: "
            f"{first}); its config.json is needed, its weights are not"
        ) from error


def find_change(adapter: Adapter, weight: WeightInfo) -> Change | None:
    """Return what an adapter changes of a tensor, by any of the names that it has in memory."""
    found = (adapter.changes.get(name) for name in names_in_memory(weight))
    return next((change for change in found if change is not None), None)


def names_in_memory(weight: WeightInfo) -> tuple[str, ...]:
    """Return the names that a planned tensor may have in memory."""
    return (weight.name, *(weight.aliases or ()))


def base_of(model: ModelReference) -> ModelReference:
    """Return the model that an adapter is put onto, or the model itself without one."""
    return ModelReference(model=model.model)


def with_base(model: ModelReference, base: ModelReference | None = None) -> ModelReference:
    """Return `BASE+ADAPTER` for an adapter that stands alone, and any other model as it is.

    Args:
        base: by default the model that the adapter names.

    Raises:
        ConfigError: the adapter does not say which model it belongs to.
        DamagedFileError: there is no such folder, or its config is damaged.
    """
    check_name(model)
    if not _is_lone_adapter(model):
        return model
    if base is None:
        config = read_lora_config(adapter_folder(model.model))
        if not config.base_model_name_or_path:
            raise ConfigError(
                f"{model} does not say which model it belongs to; write BASE+{model}, with that "
                "model"
            )
        path = {"path": config.base_model_name_or_path, "revision": config.revision}
        base = ModelReference.model_validate({"model": path})
    return ModelReference(model=base.model, lora=model.model)


def _is_lone_adapter(model: ModelReference) -> bool:
    """Tell whether a reference without `+` is an adapter's: a folder here, or a name on the Hub."""
    if model.lora is not None:
        return False
    folder = existing_folder(model.model.path)
    if folder is None:
        try:
            folder = adapter_folder(model.model)
        except DamagedFileError:  # a full model, or nothing at all
            return False
    return (folder / "adapter_config.json").is_file() and not (folder / "config.json").is_file()


def names_adapters(config: MergeConfiguration) -> bool:
    """Tell whether a model of a config is `BASE+ADAPTER`, or the folder of an adapter."""
    models = [one.model for one in _definitions(config)]
    return any(m.lora or (existing_folder(m.model.path) and _is_lone_adapter(m)) for m in models)


def plan_adapters(config: MergeConfiguration, source: str, options: MergeOptions) -> AdapterPlan:
    """Plan a merge of adapters by the config of the base, and by configs and headers of adapters.

    Args:
        config, source: of the merge, see `read_merge_config`; an expert is `BASE+ADAPTER`, or an
            adapter alone.

    Raises:
        ConfigError: the config merges something other than adapters of one base, or puts layers
            elsewhere.
        DamagedFileError: what is wrong with an adapter.
        RuntimeError, ValueError, OSError: whatever mergekit, or a merge method, says to the plan.
    """
    LoaderCache().setup(options)
    config = config.model_copy(deep=True)
    base = _complete_references(config)
    if merge_methods.get(config.merge_method).spec.contract.base is BasePolicy.REQUIRED:
        config.base_model = config.base_model or base
    models = list(dict.fromkeys([base, *config.referenced_models()]))
    network = _base_network(base)
    adapters = read_adapters(models)
    for adapter in adapters.values():
        named = adapter.config.base_model_name_or_path
        if named and not same_name(named, base.model.path):
            LOG.warning("the adapter %s was trained on %s, not on %s", adapter.name, named, base)
        if adapter.without_effect:
            LOG.warning("%s", adapter.without_effect)
    checkpoints = _checkpoints(models, network)
    with headers_only(checkpoints):
        architecture = _architecture(base, network, options)
        plan = plan_merge(config, source, options, architecture=architecture)
        lost = _not_planned(plan, adapters.values())
        if lost and any(part.slices for part in (config, *(config.modules or {}).values())):
            raise _elsewhere(lost)
        if lost:  # mergekit's architecture lacks them
            extra = [UnplannedTensor(name, tuple(models), merged=True) for name in lost]
            plan = plan_merge(config, source, options, extra, architecture)
    tensors = tuple(_changed(plan, adapters))
    experts = dict.fromkeys(model for tensor in plan.tensors for model in tensor.experts)
    merged = tuple(adapters[model] for model in experts if model in adapters)
    return AdapterPlan(plan, base, merged, tensors, tuple(checkpoints))


def _complete_references(config: MergeConfiguration) -> ModelReference:
    """Return the base, and write `BASE+ADAPTER` for every adapter that stands alone.

    Raises:
        ConfigError: there is no single base, or an expert is a full model.
    """
    inputs = list(_definitions(config))
    bases = [base_of(one.model) for one in inputs if one.model.lora is not None]
    bases = [config.base_model] if config.base_model else bases
    for one in inputs:
        one.model = with_base(one.model, next(iter(bases), None))
    bases += [base_of(one.model) for one in inputs if one.model.lora is not None]
    if not bases or not any(one.model.lora for one in inputs):
        raise ConfigError(
            "no expert of the config is an adapter; merge full models by mergekit-yaml, or write "
            "`- model: BASE+ADAPTER`"
        )
    base = bases[0]
    if base.lora is not None:
        raise ConfigError(
            f"the base model {base} is an adapter itself; write base_model: {base.model}"
        )
    if len(set(bases)) > 1:
        names = ", ".join(sorted(map(str, set(bases))))
        raise ConfigError(
            f"the adapters belong to different models ({names}); only adapters of one base merge "
            "into one adapter"
        )
    full = sorted({str(one.model) for one in inputs if one.model.lora is None} - {str(base)})
    if full:
        raise ConfigError(
            f"{', '.join(full)} is a full model, and only adapters merge into an adapter; merge "
            "all of them by mergekit-yaml, or take it out"
        )
    return base


def _definitions(
    config: MergeConfiguration,
) -> Iterator[InputModelDefinition | InputSliceDefinition]:
    """Yield every place of a config that names an input."""
    for part in (config, *(config.modules or {}).values()):
        yield from part.models or ()
        for piece in part.slices or ():
            yield from piece.sources


def _architecture(
    base: ModelReference, network: nn.Module, options: MergeOptions
) -> ModelArchitecture:
    """Return what mergekit knows, or infers, of the base.

    It infers from the index of a checkpoint's files, and needs none of these.
    """
    with TemporaryDirectory() as folder:
        base.config(trust_remote_code=options.trust_remote_code).save_pretrained(folder)
        index = {"weight_map": dict.fromkeys(network.state_dict(), "model.safetensors")}
        Path(folder, "model.safetensors.index.json").write_text(json.dumps(index))
        content = {"merge_method": "linear", "models": [{"model": {"model": folder}}]}
        return find_architecture(MergeConfiguration.model_validate(content), options)


def _checkpoints(models: Sequence[ModelReference], network: nn.Module) -> list[Checkpoint]:
    """Return headers as the checkpoints of the models would have them."""
    headers = {
        name: TensorHeader(DTYPE_NAMES.get(tensor.dtype, "F32"), tuple(tensor.shape), "")
        for name, tensor in network.state_dict().items()
    }
    index = ShardedTensorIndex("", True, dict.fromkeys(headers, ""), [])
    return [Checkpoint(model, None, index, headers) for model in models]


def _not_planned(plan: PlannedMerge, adapters: Iterable[Adapter]) -> list[str]:
    planned = {
        name for tensor in plan.tensors for name in names_in_memory(tensor.task.output_weight)
    }
    changed = dict.fromkeys(name for adapter in adapters for name in adapter.changes)
    return [name for name in changed if name not in planned]


def _changed(
    plan: PlannedMerge, adapters: Mapping[ModelReference, Adapter]
) -> Iterator[ChangedTensor]:
    moved = []
    for tensor in plan.tensors:
        inputs, weight = tensor.gather.weight_info, tensor.task.output_weight
        if any(inputs[model].name != tensor.name for model in tensor.experts if model in inputs):
            moved.append(tensor.name)
            continue
        own = {model: adapters[model] for model in tensor.experts if model in adapters}
        found = ChangedTensor({m: (a, find_change(a, weight)) for m, a in own.items()}, tensor)
        if found.known:
            yield found
    if moved:
        raise _elsewhere(moved)


def _elsewhere(names: Sequence[str]) -> ConfigError:
    return ConfigError(
        f"the config leaves out layers, repeats them or puts them elsewhere ({listed(names, 3)}), "
        "and an adapter fits only the layers that it was trained on; merge full models by "
        "mergekit-yaml"
    )
