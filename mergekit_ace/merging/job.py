# SPDX-License-Identifier: Apache-2.0
"""What every process that takes part in a merge is told, and mergekit's plan made from it."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import transformers
import yaml
from mergekit.architecture import ModelArchitecture, get_architecture_info
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.graph import Executor
from mergekit.io.tasks import LoaderCache, SaveTensor
from mergekit.options import MergeOptions
from mergekit.plan import MergePlanner
from mergekit.tokenizer import BuildTokenizer, TokenizerInfo
from pydantic import PrivateAttr

from mergekit_ace.merging.output_config import output_config


class OrderedConfiguration(MergeConfiguration):
    """A configuration that lists its models in one order.

    mergekit's own takes them from a set, so that their order changes from process to process; that
    of the tokens of a joint tokenizer, and which model is asked for a config where there is no
    base, hang on it.
    """

    _order: tuple[str, ...] = PrivateAttr(())

    def referenced_models(self) -> list[ModelReference]:
        """In the order that `in_order` was given."""
        return sorted(super().referenced_models(), key=lambda model: self._order.index(str(model)))

    @classmethod
    def in_order(cls, content: Mapping[str, Any], order: tuple[str, ...]) -> OrderedConfiguration:
        """A configuration as YAML has it, with its models by name in the order wanted."""
        config = cls.model_validate(dict(content))
        config._order = order
        return config


@dataclass(frozen=True)
class MergeJob:
    """A merge as all its processes know it; it is sent to each of them.

    Attributes:
        source: the YAML of the configuration.
        options: fields of mergekit's `MergeOptions`.
        models: names of all models, in one order.
        tokenizer: the pickled `TokenizerInfo` of the result; None where none is built. It is
            built once: mergekit numbers tokens of a union differently each time.
        scratch: folder of unfinished files, below that of the result.
        folder: that relative paths of the configuration start from.
        threads: of torch, in every process: sums of other numbers of threads differ in their last
            bits.
    """

    source: str
    options: dict[str, Any]
    models: tuple[str, ...]
    tokenizer: bytes | None
    scratch: str
    folder: str
    threads: int

    @cached_property
    def merge_options(self) -> MergeOptions:
        """mergekit's flags."""
        return MergeOptions(**self.options)

    def config(self) -> OrderedConfiguration:
        """The configuration; a new one, as planning rewrites it."""
        return OrderedConfiguration.in_order(yaml.safe_load(self.source), self.models)

    @property
    def vocabulary_multiple(self) -> int | None:
        """What the rows of the result's embeddings are padded to a multiple of."""
        settings = self.config().tokenizer
        return settings.pad_to_multiple_of if settings else None

    @cached_property
    def tokenizer_info(self) -> TokenizerInfo | None:
        """The tokenizer of the result, and where its tokens come from."""
        return None if self.tokenizer is None else pickle.loads(self.tokenizer)


@dataclass(frozen=True)
class MergePlan:
    """mergekit's plan.

    Attributes:
        architecture: of the result.
        out_config: of the result.
        saves: mergekit's tasks by tensor name, in the order in which it would run them.
        tokenizer_task: builds the tokenizer of the result; None where it is only copied.
    """

    architecture: ModelArchitecture
    out_config: transformers.PretrainedConfig
    saves: Mapping[str, SaveTensor]
    tokenizer_task: BuildTokenizer | None


def plan_job(job: MergeJob) -> MergePlan:
    """Plan as `mergekit-yaml` does; reads configs, indices and headers.

    Raises:
        RuntimeError, ValueError, OSError: whatever mergekit, or a merge method, says to the plan.
    """
    options, config = job.merge_options, job.config()
    LoaderCache().setup(options)
    architecture = get_architecture_info(config, options)
    out_config = output_config(config, architecture, trust_remote_code=options.trust_remote_code)
    planner = MergePlanner(config, architecture, options=options, out_model_config=out_config)
    targets = planner.plan_to_disk("")  # only a plan: nothing is written
    order = (handle.task() for handle in Executor(targets).schedule.tasks)
    builders = [target for target in targets if isinstance(target, BuildTokenizer)]
    return MergePlan(
        architecture,
        out_config,
        {task.tensor_name: task for task in order if isinstance(task, SaveTensor)},
        builders[0] if builders else None,
    )
