# SPDX-License-Identifier: Apache-2.0
"""Whether a result is whole: what mergekit leaves out of it, and what transformers makes of it.

mergekit leaves out, without a word, vision towers, heads that predict several tokens, norms of new
architectures, and all of ViT's encoder under the names that it has on the Hub.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from mergekit.architecture.base import ConfiguredModelArchitecture
from mergekit.architecture.conversion import _expanded_target_keys
from mergekit.common import ModelPath, ModelReference
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import logging as transformers_logging

from mergekit_ace.files.checkpoints import TensorHeader, read_headers
from mergekit_ace.files.models import (
    GENERATION,
    Checkpoint,
    Checkpoints,
    config_donor,
    empty_tensor,
    lost_model_files,
)
from mergekit_ace.merge_config import Finding
from mergekit_ace.methods.architecture import (
    BUFFER,
    BY_FILES,
    build_empty,
    model_class,
    model_names,
    names_of,
    read_names,
)
from mergekit_ace.naming import ConfigError, listed, without_numbers
from mergekit_ace.planning import (
    PlannedMerge,
    UnplannedTensor,
    layer_lists,
)

Treatment = Literal["base", "merge", "error"]
_VOCABULARY = re.compile(r"embed|head|wte")
_FAILURE = "its tensors cannot be put together"


def treat_unplanned(
    plan: PlannedMerge, checkpoints: Checkpoints, treatment: Treatment
) -> tuple[list[UnplannedTensor], list[Finding]]:
    """Find the tensors that a merge leaves out, but for buffers that any program computes anew.

    Args:
        treatment: copy all of it from the model whose config the result has, or merge what all
            models have.

    Returns:
        What is to be planned beside mergekit's plan, and what is to be said.
    """
    donor = checkpoints[config_donor(plan.config)]
    names = model_names(donor.model)
    ties = names.ties if names else {}
    lost = {model: _lost_names(one, plan, [*ties]) for model, one in checkpoints.items()}
    own = lost[donor.model]
    left = {model: [name for name in names if name in own] for model, names in lost.items()}
    foreign = {model: [n for n in names if n not in own] for model, names in lost.items()}
    findings = []
    if own and treatment == "error":
        findings.append(
            Finding.error(
                f"mergekit plans no merge of {_explain(left)}; the result would lack them",
                "`mergekit-ace merge --unplanned merge` merges them by their names, `--unplanned "
                f"base` copies them from {donor.model}. Or save the models under the names that "
                "they have in memory (save_pretrained(…, save_original_format=False))",
            )
        )
    if any(foreign.values()):
        renamed = any(  # what it lacks it has under other names, and would take no part with it
            foreign[model] and checkpoints[model].source(weight) is None
            for tensor in plan.tensors
            for model, weight in tensor.weights.items()
        )
        findings.append(
            (Finding.error if renamed else Finding.warning)(
                f"{donor.model} has no tensors of these names, so the result lacks "
                f"{_explain(foreign)}",
                f"save all models in the same way as {donor.model}, with one version of "
                "transformers, or without them if they are of no use",
            )
        )
    if treatment == "error":
        return [], findings
    models = plan.tensors[0].task.model_order
    stored = [checkpoints[model].index.tensor_paths for model in models]
    partial = [name for name in own if any(name not in names for names in stored)]
    if partial and treatment == "merge":
        text = f"not all models have {_explain({donor.model: partial})}; copied from there"
        findings.append(Finding.warning(text))
    copied = own if treatment == "base" else partial
    rows = {
        header.shape[:1]
        for tensor in plan.tensors
        for model, weight in tensor.weights.items()
        if model == donor.model and weight.vocabulary_axis == 0
        if (header := donor.source(weight))
    }
    return [_unplanned_tensor(name, donor, models, copied, rows) for name in own], findings


def check_labels(plan: PlannedMerge, treatment: Treatment) -> Iterator[Finding]:
    """Find heads that the base has for another number of labels than an expert."""
    if plan.heads and treatment != "base":
        yield Finding.error(
            "the models have different numbers of labels, so that "
            f"{listed(plan.heads)} cannot be merged",
            f"`mergekit-ace merge --unplanned base` keeps those of {config_donor(plan.config)}; or "
            "replace the models by some with the same labels",
        )


def check_whole(plan: PlannedMerge, checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find tensors that the config of the result asks for, or has no place for, before they are.

    What the model that gives its config lacks, or has too many of, the result may as well.
    """
    donor, trust = checkpoints[config_donor(plan.config)], plan.options.trust_remote_code
    stored, known = set(donor.index.tensor_paths), model_names(donor.model)
    planned = {
        tensor.name
        for tensor in plan.tensors
        if any(checkpoints[model].source(weight) for model, weight in tensor.weights.items())
    }
    if known is None or (planned == stored and not plan.config.slices):
        return
    try:
        network = build_empty(copy.deepcopy(plan.out_config), trust_remote_code=trust)
        found = read_names(network, planned)
    except Exception:  # whatever a config or a model's constructor raises
        return
    faults = (
        ("lacks", found.lacking, known.lacking),
        (
            "has no place for",
            planned - found.memory.keys() - found.converted,
            stored - known.memory.keys() - known.converted,
        ),
    )
    for what, names, excused in faults:
        templates = {without_numbers(name) for name in excused}  # of any layer
        if new := sorted(name for name in names if without_numbers(name) not in templates):
            yield Finding.error(
                f"the result {what} {len(new)} tensors by its config, which is that of "
                f"{donor.model}: {listed(new)}",
                "see what `slices:` and `modules:` of the config leave out, and what "
                "`mergekit-ace merge --unplanned` carries over",
            )


def _unplanned_tensor(
    name: str,
    donor: Checkpoint,
    models: tuple[ModelReference, ...],
    copied: Sequence[str],
    rows: set[tuple[int, ...]],  # of embeddings
) -> UnplannedTensor:
    """Return how a tensor gets into a result; whole numbers are copied."""
    header = donor.headers.get(name)
    merged = _is_floating(header) and name not in copied
    of_tokens = header is not None and header.shape[:1] in rows
    return UnplannedTensor(
        name,
        models if merged else (donor.model,),
        merged,
        vocabulary=of_tokens and _VOCABULARY.search(name) is not None,
    )


def _lost_names(checkpoint: Checkpoint, plan: PlannedMerge, ties: Sequence[str]) -> list[str]:
    """Return the tensors of a checkpoint that mergekit neither knows, nor packs into what it plans.

    It knows all weights of the architecture, also of layers that are not merged.

    Args:
        ties: names in memory of what is tied to something else.
    """
    model, stored = checkpoint.model, checkpoint.index.tensor_paths
    config = model.config(trust_remote_code=plan.options.trust_remote_code)
    planned = [t.weights[model] for t in plan.tensors if model in t.weights]
    try:
        architecture = ConfiguredModelArchitecture(info=plan.architecture, config=config)
        known = architecture.all_weights()
    except RuntimeError:  # of another architecture, see --allow-crimes: the plan has to do
        known = []
    names = {name for weight in (*known, *planned) for name in names_of(weight)}
    packed = {name for w in planned if not names_of(w) & stored.keys() for name in names_of(w)}
    kind = checkpoint.config.get("model_type")
    transforms = get_checkpoint_conversion_mapping(kind) if packed and kind else None
    return [
        name
        for name in stored
        if name not in names
        and not _conversions(name, transforms or ()) & packed
        and not any(name.endswith(key) or key.endswith(name) for key in ties)
        and not BUFFER.search(name)
        and _is_floating(checkpoint.headers.get(name))
    ]


def _conversions(name: str, transforms: Sequence[Any]) -> set[str]:
    """Return the names in memory that mergekit makes of a stored tensor, or of parts like it."""
    names = {name}
    for transform in transforms:
        for known in tuple(names):
            renamed, pattern = transform.rename_source_key(known)
            if pattern is not None:
                names |= {renamed, *_expanded_target_keys(renamed, transform.target_patterns)}
    return names


def _is_floating(header: TensorHeader | None) -> bool:
    return header is None or header.dtype.startswith(("F", "BF"))


def _explain(names: Mapping[ModelReference, Sequence[str]]) -> str:
    """Return which tensors are meant, of which models."""
    tensors = sorted({name for own in names.values() for name in own})
    count = f"{len(tensors)} tensor{'s' * (len(tensors) > 1)}"
    models = [str(model) for model, own in names.items() if own]
    return f"{count} of {listed(models)} ({listed(tensors)})"


def check_model_files(plan: PlannedMerge) -> Iterator[Finding]:
    """Find what `mergekit-yaml` merges otherwise, and files that it leaves out of the result."""
    config, donor, trust = plan.config, config_donor(plan.config), plan.options.trust_remote_code
    if plan.architecture.expected_model_type == BY_FILES:
        yield Finding.warning(
            f"mergekit has no description of {donor} that fits its files: mergekit-yaml fails, "
            "leaves tensors out, or writes other names than these have",
            "merge by `mergekit-ace merge`, which goes by the names of the tensors",
        )
    settings = donor.config(trust_remote_code=trust).get_text_config()
    for name, entries in layer_lists(config, trust).items():
        if len(entries) != len(getattr(settings, name, entries)):
            yield Finding.error(
                f"the result has {len(entries)} layers, and its config.json would have "
                f"{len(getattr(settings, name))} `{name}`, which transformers refuses to save: "
                "mergekit-yaml fails at its very end",
                "merge by `mergekit-ace merge`, which writes those of the slices",
            )
    lost = lost_model_files(config, tuple(plan.architecture.tagalong_files or ()))
    if lost:
        end = ", so that it may not know all tokens that end a text" if GENERATION in lost else ""
        yield Finding.warning(
            f"mergekit-yaml leaves {', '.join(sorted(lost))} of {next(iter(lost.values()))} out of "
            f"the result{end}",
            "add what is missing with `mergekit-ace card OUT` afterwards; `mergekit-ace merge` "
            "copies it itself",
        )


NotLoadedError = ConfigError  # its former name


def verify_model(
    folder: Path, donor: ModelReference, donor_folder: Path, *, trust_remote_code: bool
) -> str:
    """Return what is wrong with a result as transformers would load it; empty for a whole model.

    Only headers are read. What the donor, which gave its config, lacks or has too many of, the
    result may as well: a backbone without the head that its config names, for example.

    Raises:
        ConfigError: transformers does not load the donor either.
    """
    result = _faults(merged_model(folder), folder, trust_remote_code)
    if not result:
        return ""
    origin = _faults(donor, donor_folder, trust_remote_code)
    if _FAILURE in origin:
        raise ConfigError(f"transformers does not load {donor} either: {origin[_FAILURE][0]}")
    texts = []
    for what, names in result.items():
        known = {without_numbers(name) for name in origin.get(what, ())}  # of any layer
        new = [name for name in names if without_numbers(name) not in known]
        if new:
            texts.append(f"{what.format(len(new))}: {listed(new)}")
    return "; ".join(texts)


def _faults(model: ModelReference, folder: Path, trust_remote_code: bool) -> dict[str, list[str]]:
    """Load a checkpoint without its values by transformers; return names by what is wrong."""
    config = model.config(trust_remote_code=trust_remote_code)
    headers = read_headers(folder)
    try:
        kind: Any = model_class(config, trust_remote_code)
        with quiet_transformers():
            _, info = kind.from_pretrained(
                None,
                config=config,
                state_dict={name: empty_tensor(header) for name, header in headers.items()},
                device_map="meta",
                ignore_mismatched_sizes=True,
                output_loading_info=True,
            )
    except Exception as error:  # of many kinds: no such class, shapes that do not fit together
        return {_FAILURE: [str(error).strip() or type(error).__name__]}
    faults = {
        "it lacks {} tensors": sorted(info["missing_keys"]),
        "its config has no place for {} tensors": sorted(info["unexpected_keys"]),
        "{} tensors have another shape than in its config": [
            f"{name} {tuple(stored)} instead of {tuple(expected)}"
            for name, stored, expected in sorted(info["mismatched_keys"])
        ],
    }
    return {what: names for what, names in faults.items() if names}


def merged_model(folder: Path) -> ModelReference:
    """Return mergekit's reference to a folder, whatever its name."""
    return ModelReference(model=ModelPath(path=str(folder)))


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silence transformers' bars and all that it says below errors."""
    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
