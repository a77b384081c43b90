# SPDX-License-Identifier: Apache-2.0
"""Tensors that go into a result otherwise than mergekit plans them, or though it plans none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mergekit.architecture import WeightInfo
from mergekit.common import ModelReference
from mergekit.config import ConfigReader, MergeConfiguration
from mergekit.io.tasks import SaveTensor, TensorWriterTask
from mergekit.plan import MergePlanner

from mergekit_ace.naming import is_counter, layer_of, stack_size


@dataclass(frozen=True)
class UnplannedTensor:
    """A tensor that goes into the result though mergekit's architecture does not name it.

    Attributes:
        name: in the files of the models, and in the result.
        models: whose it is merged from; the only one where it is copied.
        merged: by the config's method; else copied.
        floating: whether it has a dtype of fractions, which the result's dtype replaces.
        vocabulary: whether its rows belong to tokens.
    """

    name: str
    models: tuple[ModelReference, ...]
    merged: bool
    floating: bool = True
    vocabulary: bool = False

    @property
    def weight(self) -> WeightInfo:
        """The tensor as mergekit describes one."""
        return WeightInfo(name=self.name, vocabulary_axis=0 if self.vocabulary else None)


def plan_unplanned(
    planner: MergePlanner, tensors: Sequence[UnplannedTensor], writer: TensorWriterTask
) -> Iterator[SaveTensor]:
    """Yield mergekit's tasks for tensors that it has not planned.

    Args:
        planner: has planned the merge.
        tensors: to be planned as well.
        writer: of the tasks.

    Raises:
        RuntimeError, ValueError: whatever the merge method says to one of them.
    """
    names = [tensor.name for tensor in tensors]
    for tensor in tensors:
        one = planner if tensor.merged else _copier(planner, tensor)
        module = next(iter(one.config.modules.values()))
        reader = ConfigReader(config=one.config, t=_depth(tensor.name, names), module=module)
        weights = [tensor.weight] * len(tensor.models)
        one.plan_tensor(
            tensor.weight, weights, list(tensor.models), reader.for_out_slice(module.slices[0])
        )
        _, task = one._tensors.pop()
        dtype = one.config.out_dtype if tensor.floating else None
        yield SaveTensor(
            tensor_name=tensor.name,
            tensor_task=task,
            writer_task=writer,
            clone=one.options.clone_tensors,
            dtype=dtype,
        )


def keep_counters(planner: MergePlanner, saves: Sequence[SaveTensor]) -> list[SaveTensor]:
    """Take counters of batches from one model, the base where there is one.

    They are whole numbers, which mergekit merges only where all models have the same.
    """
    kept = []
    for save in saves:
        if is_counter(save.tensor_name):
            model = planner.config.base_model or save.tensor_task.model_order[0]
            counter = UnplannedTensor(save.tensor_name, (model,), merged=False, floating=False)
            (save,) = plan_unplanned(planner, [counter], save.writer_task)
        kept.append(save)
    return kept


def _copier(planner: MergePlanner, tensor: UnplannedTensor) -> MergePlanner:
    """Return a planner that takes a tensor from one model; numbers of tokens are the result's."""
    config, settings = planner.config, planner.config.tokenizer
    copied = MergeConfiguration(
        merge_method="passthrough",
        models=[{"model": tensor.models[0]}],
        dtype=config.dtype if tensor.floating else None,
        out_dtype=config.out_dtype,
        # rows of single tokens may be configured to come from models that are not asked here
        tokenizer=settings.model_copy(update={"tokens": None}) if settings else None,
    )
    copier = MergePlanner(copied, planner.arch_info, planner.options, planner.out_model_config)
    copier.normalize_config()
    copier._tokenizer_task = planner._tokenizer_task
    return copier


def _depth(name: str, names: Sequence[str]) -> float:
    """Return where in its stack a tensor is, from 0 to 1, as mergekit counts for its gradients."""
    layer, layers = layer_of(name), stack_size(name, names)
    if layer is None:
        return 0.0
    return layer / (layers - 1) if layers > 1 else 1.0
