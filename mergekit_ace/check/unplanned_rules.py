# SPDX-License-Identifier: Apache-2.0
"""What mergekit leaves out of a result without a word: tensors that it does not plan, and files.

Such tensors are vision towers, heads that predict several tokens, norms of new architectures, and
all of ViT's encoder under the names that it has on the Hub.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from mergekit.architecture import WeightInfo
from mergekit.architecture.base import ConfiguredModelArchitecture
from mergekit.architecture.conversion import _expanded_target_keys
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

from mergekit_ace.check.checkpoints import Checkpoint, Checkpoints
from mergekit_ace.check.findings import Finding, listed
from mergekit_ace.check.loading import wanted_names
from mergekit_ace.files.headers import TensorHeader
from mergekit_ace.files.model_files import GENERATION, config_donor, lost_model_files
from mergekit_ace.methods.architecture import empty_network
from mergekit_ace.planning import (
    PlannedMerge,
    PlannedTensor,
    layer_lists,
    mergekit_architecture,
)
from mergekit_ace.unplanned import UnplannedTensor

Treatment = Literal["base", "merge", "error"]
# What old checkpoints hold though any program computes it anew.
_BUFFER = re.compile(
    r"(inv_freq|(cos|sin)_cached|masked_bias|position_ids|(attn|attention)\.bias)$"
)
_VOCABULARY = re.compile(r"embed|head|wte")


@dataclass(frozen=True)
class Unplanned:
    """What a merge would leave out, without buffers that any program computes anew.

    Attributes:
        donor: the model whose config the result has: the base, or the first one.
        left: names that are the donor's as well, by model.
        foreign: names that the donor lacks, by model.
        needed: whether transformers would load one of these.
    """

    donor: ModelReference
    left: Mapping[ModelReference, tuple[str, ...]]
    foreign: Mapping[ModelReference, tuple[str, ...]]
    needed: bool


def find_unplanned(plan: PlannedMerge, checkpoints: Checkpoints) -> Unplanned:
    """Find the tensors that a merge leaves out, but for buffers that any program computes anew."""
    donor, left = config_donor(plan.config), {}
    for model, checkpoint in checkpoints.items():
        known = _known(model, plan)
        planned = [dict(tensor.gather.weight_info.items()).get(model) for tensor in plan.tensors]
        left[model] = _unread(checkpoint, known, [weight for weight in planned if weight])
    needed, tied = _wanted(donor, {name for names in left.values() for name in names})
    for model, names in left.items():
        headers = checkpoints[model].headers
        lost = (n for n in names if n in needed or not _is_buffer(n, headers.get(n)))
        left[model] = [name for name in lost if name not in tied]
    own = set(left[donor])

    def pick(condition: Callable[[str], bool]) -> dict[ModelReference, tuple[str, ...]]:
        picked = {model: tuple(filter(condition, names)) for model, names in left.items()}
        return {model: names for model, names in picked.items() if names}

    foreign = pick(lambda name: name not in own)
    return Unplanned(
        donor,
        pick(lambda name: name in own),
        foreign,
        any(needed & set(names) for names in foreign.values()),
    )


def _known(model: ModelReference, plan: PlannedMerge) -> list[WeightInfo]:
    """Return all weights that mergekit knows of a model, also of layers that are not merged."""
    config = model.config(trust_remote_code=plan.options.trust_remote_code)
    try:
        return ConfiguredModelArchitecture(info=plan.architecture, config=config).all_weights()
    except RuntimeError:  # of another architecture, see --allow-crimes: the plan has to do
        return []


def _unread(
    checkpoint: Checkpoint, known: Sequence[WeightInfo], planned: Sequence[WeightInfo]
) -> list[str]:
    """Return the names of a checkpoint that are neither known, nor packed into what is planned."""
    stored = checkpoint.index.tensor_paths
    names = {name for weight in (*known, *planned) for name in _names(weight)}
    packed = {name for w in planned if not _names(w) & stored.keys() for name in _names(w)}
    left = [name for name in stored if name not in names]
    kind = checkpoint.config.get("model_type")
    if not packed or not kind:
        return left
    transforms = get_checkpoint_conversion_mapping(kind) or ()
    return [name for name in left if not _conversions(name, transforms) & packed]


def _names(weight: WeightInfo) -> set[str]:
    """Return all names under which mergekit looks for a weight."""
    return {weight.name, *(weight.aliases or ()), *(weight.tied_names or ())}


def _conversions(name: str, transforms: Sequence[Any]) -> set[str]:
    """Return the names in memory that mergekit makes of a stored tensor, or of parts like it."""
    names = {name}
    for transform in transforms:
        for known in tuple(names):
            renamed, pattern = transform.rename_source_key(known)
            if pattern is not None:
                names |= {renamed, *_expanded_target_keys(renamed, transform.target_patterns)}
    return names


def _wanted(donor: ModelReference, names: set[str]) -> tuple[set[str], set[str]]:
    """Return what transformers needs, and what it ties; nothing of an unknown architecture."""
    if not names:
        return set(), set()
    try:
        return wanted_names(empty_network(donor), names)
    except Exception:  # whatever a model's constructor raises
        return set(), set()


def _is_buffer(name: str, header: TensorHeader | None) -> bool:
    """Tell whether nobody misses a tensor that transformers does not load."""
    return _BUFFER.search(name) is not None or not _is_floating(header)


def _is_floating(header: TensorHeader | None) -> bool:
    return header is None or header.dtype.startswith(("F", "BF"))


def _explain(left: Mapping[ModelReference, tuple[str, ...]]) -> str:
    """Return which tensors are left out of which models."""
    models: dict[tuple[str, ...], list[ModelReference]] = {}
    for model, names in left.items():
        models.setdefault(names, []).append(model)
    return "; ".join(
        f"{_count(names)} of {listed([*map(str, owners)])} ({listed(sorted(names))})"
        for names, owners in models.items()
    )


def _count(names: Sequence[str]) -> str:
    return f"{len(names)} tensor{'s' * (len(names) > 1)}"


def treat_unplanned(
    unplanned: Unplanned,
    treatment: Treatment,
    tensors: Sequence[PlannedTensor],
    checkpoints: Checkpoints,
) -> tuple[list[UnplannedTensor], list[Finding]]:
    """Return what is to be planned beside mergekit's plan, and what is to be said of it.

    Args:
        treatment: copy all of it from the donor; or merge what all models have.
    """
    findings = [*_complaints(unplanned, treatment)]
    if treatment == "error" or not unplanned.left:
        return [], findings
    donor, models = unplanned.donor, tensors[0].task.model_order
    rows = _vocabulary_rows(tensors, checkpoints[donor])
    extra, copied = [], []
    for name in unplanned.left[donor]:
        header = checkpoints[donor].headers.get(name)
        everywhere = all(name in checkpoints[model].index.tensor_paths for model in models)
        merged = treatment == "merge" and everywhere and _is_floating(header)
        if treatment == "merge" and not everywhere:
            copied.append(name)
        of_tokens = header is not None and header.shape[:1] == (rows,)
        extra.append(
            UnplannedTensor(
                name,
                models if merged else (donor,),
                merged,
                floating=_is_floating(header),
                vocabulary=of_tokens and _VOCABULARY.search(name) is not None,
            )
        )
    if copied:
        text = f"not all models have {_count(copied)} of {donor}; copied from there"
        findings.append(Finding.warning("tensors", f"{text}: {listed(copied)}"))
    return extra, findings


def _vocabulary_rows(tensors: Sequence[PlannedTensor], checkpoint: Checkpoint) -> int | None:
    """Return the number of rows that embeddings have; None where there are none."""
    for tensor in tensors:
        weight = dict(tensor.gather.weight_info.items()).get(checkpoint.model)
        if weight is not None and weight.vocabulary_axis == 0:
            header = checkpoint.source(weight)
            return header.shape[0] if header else None
    return None


def _complaints(unplanned: Unplanned, treatment: Treatment) -> Iterator[Finding]:
    donor = unplanned.donor
    if unplanned.left and treatment == "error":
        yield Finding.error(
            "tensors",
            f"mergekit plans no merge of {_explain(unplanned.left)}; the result would lack them",
            "`mergekit-ace merge --unplanned merge` merges them by their names, `--unplanned base` "
            f"copies them from {donor}. Or save the models under the names that they have in "
            "memory (save_pretrained(…, save_original_format=False))",
        )
    if unplanned.foreign:
        yield (Finding.error if unplanned.needed else Finding.warning)(
            "tensors",
            f"{donor} has no tensors of these names, so the result lacks "
            f"{_explain(unplanned.foreign)}",
            f"save all models in the same way as {donor}, with one version of transformers, or "
            "without them if they are of no use",
        )


def check_model_files(config: MergeConfiguration, options: MergeOptions) -> Iterator[Finding]:
    """Find what `mergekit-yaml` cannot plan, and files that it leaves out of the result."""
    architecture = mergekit_architecture(config.model_copy(deep=True), options)
    if architecture is None:
        yield Finding.error(
            "models",
            f"{config_donor(config)} has no embeddings, and mergekit-yaml plans no merge of such "
            "models",
            "merge by `mergekit-ace merge`, which goes by the names of the tensors",
        )
        return
    trust = options.trust_remote_code
    settings = config_donor(config).config(trust_remote_code=trust).get_text_config()
    for name, entries in layer_lists(config, trust).items():
        if len(entries) != len(getattr(settings, name, entries)):
            yield Finding.error(
                "files",
                f"the result has {len(entries)} layers, and its config.json would have "
                f"{len(getattr(settings, name))} `{name}`, which transformers refuses to save: "
                "mergekit-yaml fails at its very end",
                "merge by `mergekit-ace merge`, which writes those of the slices",
            )
    lost = lost_model_files(config, tuple(architecture.tagalong_files or ()))
    if not lost:
        return
    end = ", so that it may not know all tokens that end a text" if GENERATION in lost else ""
    yield Finding.warning(
        "files",
        f"mergekit-yaml leaves {', '.join(sorted(lost))} of {next(iter(lost.values()))} out of the "
        f"result{end}",
        "add what is missing with `mergekit-ace card OUT` afterwards; `mergekit-ace merge` copies "
        "it itself",
    )
