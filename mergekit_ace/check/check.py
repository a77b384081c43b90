# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace check`: what can be known before a merge, and what the merge takes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal

from mergekit.architecture.base import ConfiguredModelArchitecture
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_ace.check.loading import loading_faults, new_faults
from mergekit_ace.check.models import (
    check_checkpoints,
    check_padding,
    check_tensors,
    safetensors_dtype,
)
from mergekit_ace.files.checkpoints import item_size
from mergekit_ace.files.models import (
    GENERATION,
    Checkpoint,
    Checkpoints,
    config_donor,
    headers_only,
    lost_model_files,
    names_of,
    read_checkpoint,
)
from mergekit_ace.merge_config import Finding, check_config, check_keys, check_settings
from mergekit_ace.methods.architecture import BUFFER, BY_FILES, model_names
from mergekit_ace.methods.base import TaskVectorMethod, sweep
from mergekit_ace.naming import ConfigError, FileError, in_bytes, listed
from mergekit_ace.planning import (
    PlannedMerge,
    UnplannedTensor,
    layer_lists,
    plan_merge,
    read_merge_config,
    read_yaml,
)

Treatment = Literal["base", "merge", "error"]
_VOCABULARY = re.compile(r"embed|head|wte")
MARGIN = 1.02  # of the result's size, for indices, tokenizers and the rest
PROCESS = 700_000_000  # bytes: python with torch, transformers and mergekit


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
        memory = f"about {in_bytes(self.memory)}"
        if self.device_memory is not None:
            memory += f", and {in_bytes(self.device_memory)} on the device"
        return (
            f"  work  up to {self.operations:.2g} operations\n"
            f"memory  {memory}\n"
            f"  disk  reads {in_bytes(self.read)}, writes {in_bytes(self.written)}"
        )


@dataclass(frozen=True)
class Preflight:
    """Result of a check: findings, errors first; the plan, if there is one, and what it takes."""

    findings: Sequence[Finding]
    plan: PlannedMerge | None = None
    checkpoints: Checkpoints = field(default_factory=dict)
    estimate: MergeEstimate | None = None
    models: Sequence[str] = ()

    @property
    def ok(self) -> bool:
        return all(finding.level != "error" for finding in self.findings)

    @property
    def text(self) -> str:
        errors = sum(finding.level == "error" for finding in self.findings)
        verdict = "nothing to complain about: the merge may start"
        if self.findings:
            verdict = f"errors: {errors}, warnings: {len(self.findings) - errors}"
        estimate = [self.estimate.text] if self.estimate else []
        told = [finding.text for finding in self.findings]
        return "\n".join([*told, verdict, *estimate, "", *self.models])


def check_merge(
    path: Path,
    options: MergeOptions,
    out: Path | None = None,
    unplanned: Treatment | None = None,
    *,
    strict: bool = True,
) -> Preflight:
    """Check a config and its models by configs, tokenizers and headers.

    Args:
        out: where the result is to be written; the present folder's disk by default.
        unplanned: what the `mergekit-ace merge` that is about to start, and looks after the disk
            itself, does with tensors that mergekit does not plan; None for `mergekit-yaml`.
        strict: without, only what hinders the plan is found.
    """
    try:
        config = read_merge_config(path)
    except ConfigError as error:
        findings = [Finding.error(str(error))]
        with suppress(ConfigError):  # a misspelt `models:` is more than a missing one
            findings += check_keys(read_yaml(path)[0])
        return Preflight(findings)
    findings = [*check_config(config)] if strict else []
    checkpoints: dict[ModelReference, Checkpoint] = {}
    plan = estimate = None
    models = sorted(config.referenced_models(), key=lambda m: (m != config.base_model, str(m)))
    for model in models:
        try:
            checkpoints[model] = read_checkpoint(model)
        except FileError as error:
            findings.append(Finding.error(str(error)))
    if len(checkpoints) == len(models):
        bare_adapters = unplanned is None and not options.lora_merge_cache
        if strict:
            findings += check_checkpoints(checkpoints, config, bare_adapters=bare_adapters)
        with headers_only(list(checkpoints.values())):
            try:
                plan = plan_merge(config, options, checkpoints, as_run=unplanned is not None)
                plan, told = _with_unplanned(plan, checkpoints, unplanned or "error")
                findings += told
                if strict and all(finding.level != "error" for finding in told):
                    findings += _check_whole(plan, checkpoints)
            except Exception as error:  # mergekit raises whatever its parts do
                text = str(error) or type(error).__name__
                if isinstance(error, KeyError):  # mergekit looks a module up
                    text = f"the architecture has no part {text}; most have one, called `default`"
                findings.append(Finding.error(text))
    lines = list(_model_lines(config, checkpoints))
    if plan is not None and strict:
        estimate = estimate_merge(plan, checkpoints)
        findings += check_tensors(plan.tensors, checkpoints)
        findings += check_padding(plan, checkpoints)
        findings += check_settings(plan)
        if unplanned is None:
            findings += _check_mergekit_yaml(plan)
            findings += _check_disk(estimate, out or Path("."))
        method = plan.method
        known = method.about if isinstance(method, TaskVectorMethod) else method.spec.pretty_name
        lines.insert(0, f"method  {known or config.merge_method}")
    findings.sort(key=lambda finding: finding.level != "error")
    return Preflight(findings, plan, checkpoints, estimate, lines)


def _with_unplanned(
    plan: PlannedMerge, checkpoints: Checkpoints, treatment: Treatment
) -> tuple[PlannedMerge, list[Finding]]:
    """Return a plan with what mergekit leaves out of it, and what is said of that."""
    extra, findings = _treat_unplanned(plan, checkpoints, treatment)
    plan = plan.extended(extra)
    if plan.planner.heads and treatment != "base":
        findings.append(
            Finding.error(
                "the models have different numbers of labels, so that "
                f"{listed(plan.planner.heads)} cannot be merged",
                f"`mergekit-ace merge --unplanned base` keeps those of {config_donor(plan.config)}",
            )
        )
    return plan, findings


def _check_mergekit_yaml(plan: PlannedMerge) -> Iterator[Finding]:
    """Find what `mergekit-yaml` fails over, merges otherwise, or leaves out of the result."""
    config, donor, trust = plan.config, config_donor(plan.config), plan.options.trust_remote_code
    weights = [tensor.task.output_weight for tensor in plan.tensors]
    kept = [w.name for w in weights if w.force_dtype and safetensors_dtype(w.force_dtype)]
    if kept:
        yield Finding.warning(
            f"mergekit-yaml rounds {len(kept)} tensors that all models keep in a wider dtype than "
            f"the others: {listed(kept)}",
            "merge by mergekit-ace merge, which leaves them in it",
        )
    if plan.architecture.expected_model_type == BY_FILES:
        yield Finding.warning(
            f"mergekit has no description of {donor} that fits its files: mergekit-yaml fails, or "
            "leaves tensors out",
            "merge by `mergekit-ace merge`, which goes by the names of the tensors",
        )
    settings = donor.config(trust_remote_code=trust).get_text_config()
    for name, entries in layer_lists(config, trust).items():
        if len(entries) != len(getattr(settings, name, entries)):
            yield Finding.error(
                f"the result has {len(entries)} layers, and its config.json would have "
                f"{len(getattr(settings, name))} `{name}`: mergekit-yaml fails at its very end",
                "merge by `mergekit-ace merge`, which writes those of the slices",
            )
    lost = lost_model_files(config, tuple(plan.architecture.tagalong_files or ()))
    if lost:
        end = ", so that it may not know all tokens that end a text" if GENERATION in lost else ""
        yield Finding.warning(
            f"mergekit-yaml leaves {', '.join(sorted(lost))} of {next(iter(lost.values()))} out of "
            f"the result{end}",
            "add what is missing by `mergekit-ace card OUT`, or merge by `mergekit-ace merge`",
        )


def _check_disk(estimate: MergeEstimate, out: Path) -> Iterator[Finding]:
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free, wanted = shutil.disk_usage(place).free, int(MARGIN * estimate.written)
    if free < wanted:
        yield Finding.error(
            f"the result takes {in_bytes(wanted)}, but {place} has {in_bytes(free)} left",
            "free some space, or write elsewhere",
        )


def _treat_unplanned(
    plan: PlannedMerge, checkpoints: Checkpoints, treatment: Treatment
) -> tuple[list[UnplannedTensor], list[Finding]]:
    """Find the tensors that a merge leaves out, but for buffers that any program computes anew.

    mergekit leaves out, without a word, vision towers, heads that predict several tokens, norms of
    new architectures, and all of ViT's encoder under the names that it has on the Hub.

    Return what is to be planned beside mergekit's plan, and what is to be said: `treatment` is to
    copy all of it from the model whose config the result has, or to merge what all models have.
    """
    donor = checkpoints[config_donor(plan.config)]
    lost = {model: _lost_names(checkpoint, plan) for model, checkpoint in checkpoints.items()}
    own = lost[donor.model]
    foreign = {model: [n for n in names if n not in own] for model, names in lost.items()}
    findings = []
    if own and treatment == "error":
        findings.append(
            Finding.error(
                f"mergekit plans no merge of {_explain({donor.model: own})}; the result would lack "
                "them",
                "`mergekit-ace merge --unplanned merge` merges them by their names, `--unplanned "
                f"base` copies them from {donor.model}. Or save the models under the names that "
                "they have in memory (save_pretrained(…, save_original_format=False))",
            )
        )
    if any(foreign.values()):
        findings.append(
            Finding.warning(
                f"{donor.model} has no tensors of these names, so the result lacks "
                f"{_explain(foreign)}",
                f"save all models in the same way as {donor.model}, if they are of use",
            )
        )
    if treatment == "error":
        return [], findings
    models = plan.tensors[0].task.model_order
    embeddings = [t.weights[donor.model] for t in plan.tensors if donor.model in t.weights]
    embeddings = [donor.source(weight) for weight in embeddings if weight.vocabulary_axis == 0]
    rows = {header.shape[0] for header in embeddings if header}
    extra, partial = [], []
    for name in own:
        header = donor.headers[name]
        common = all(name in checkpoints[model].headers for model in models)
        merged = treatment == "merge" and common
        vocabulary = bool(_VOCABULARY.search(name)) and not rows.isdisjoint(header.shape[:1])
        chosen = models if merged else (donor.model,)
        extra.append(UnplannedTensor(name, chosen, merged, vocabulary))
        partial += [] if common else [name]
    if partial and treatment == "merge":
        text = f"not all models have {_explain({donor.model: partial})}; copied from there"
        findings.append(Finding.warning(text))
    return extra, findings


def _lost_names(checkpoint: Checkpoint, plan: PlannedMerge) -> list[str]:
    """Return the tensors of a checkpoint that mergekit does not know.

    It knows all weights of the architecture, also of layers that are not merged.
    """
    model, donor_names = checkpoint.model, model_names(config_donor(plan.config))
    ties = donor_names.ties if donor_names else {}  # names in memory of what is tied
    config = model.config(trust_remote_code=plan.options.trust_remote_code)
    planned = [t.weights[model] for t in plan.tensors if model in t.weights]
    try:
        architecture = ConfiguredModelArchitecture(info=plan.architecture, config=config)
        known = architecture.all_weights()
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


def _explain(names: Mapping[ModelReference, Sequence[str]]) -> str:
    """Return which tensors are meant, of which models."""
    tensors = sorted({name for own in names.values() for name in own})
    count = f"{len(tensors)} tensor{'s' * (len(tensors) > 1)}"
    models = [str(model) for model, own in names.items() if own]
    return f"{count} of {listed(models)} ({listed(tensors)})"


def _check_whole(plan: PlannedMerge, checkpoints: Checkpoints) -> Iterator[Finding]:
    """Find what the config of the result asks for, or has no place for, before it is merged."""
    donor, trust = checkpoints[config_donor(plan.config)], plan.options.trust_remote_code
    planned = {tensor.name: tensor.headers(checkpoints) for tensor in plan.tensors}
    headers = {
        name: own.get(donor.model, next(iter(own.values()))) for name, own in planned.items() if own
    }
    if headers.keys() == donor.headers.keys() and not plan.config.slices:
        return
    result = loading_faults(plan.out_config, headers, trust)
    config = donor.model.config(trust_remote_code=trust)
    with suppress(ConfigError):  # transformers does not load the models either
        text = new_faults(result, loading_faults(config, donor.headers, trust), donor.model)
        if text:
            yield Finding.error(
                f"the result would be no model that transformers loads whole: {text}",
                "see what `slices:` and `modules:` of the config leave out, and what "
                "`mergekit-ace merge --unplanned` carries over",
            )


def estimate_merge(plan: PlannedMerge, checkpoints: Checkpoints) -> MergeEstimate:
    """Return what a merge takes, from the shapes of its tensors."""
    config, on_device = plan.config, plan.options.device not in (None, "cpu")
    operations, read, written = 0.0, 0, 0
    most = most_on_device = 0  # bytes of one tensor
    for tensor in plan.tensors:
        headers = tensor.headers(checkpoints)
        header = headers.get(tensor.base) if tensor.base else next(iter(headers.values()), None)
        if header is None:
            continue
        method, settings = tensor.method, tensor.settings
        work = sweep(header.shape, max(1, len(headers) - 1))
        if isinstance(method, TaskVectorMethod):
            if method.layouts:
                settings = replace(settings, layout=method.layout(settings, len(header.shape)))
            weights = zip(settings.experts, settings.weights, strict=True)
            experts = sum(weight != 0 for model, weight in weights if model in headers)
            work = method.work(settings, header.shape, experts)
        merged_in = safetensors_dtype(config.dtype) or header.dtype
        output = header.entries * item_size(safetensors_dtype(config.out_dtype) or merged_in)
        inputs = len(headers) * header.entries * item_size(merged_in)
        working = work.working + 4 * header.entries  # with the result in float32
        most = max(most, inputs + output + (0 if on_device else working))
        most_on_device = max(most_on_device, inputs + working)
        operations += work.operations
        read += sum(one.bytes for one in headers.values())
        written += output
    memory = PROCESS + most + min(written, plan.options.out_shard_size)  # one shard is held
    return MergeEstimate(operations, memory, most_on_device if on_device else None, read, written)


def _model_lines(config: MergeConfiguration, checkpoints: Checkpoints) -> Iterator[str]:
    for model, checkpoint in checkpoints.items():
        role = "base" if model == config.base_model else "expert"
        parts = [f"{len(checkpoint.headers)} tensors", in_bytes(checkpoint.bytes)]
        parts += sorted(checkpoint.entries_by_dtype)
        if size := checkpoint.config.get("vocab_size"):
            parts.append(f"vocabulary {size}")
        yield f"{role:>6}  {model}: {', '.join(parts)}"
