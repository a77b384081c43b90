# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace check`: everything that can be known before a merge, and what the merge takes."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_ace.adapters.merge import MergeProducts
from mergekit_ace.check.loading import (
    Treatment,
    check_labels,
    check_model_files,
    check_whole,
    treat_unplanned,
)
from mergekit_ace.check.models import (
    check_adapters,
    check_checkpoints,
    check_padding,
    check_tensors,
    planned_headers,
    safetensors_dtype,
)
from mergekit_ace.files.checkpoints import item_size
from mergekit_ace.files.models import Checkpoint, Checkpoints, headers_only, read_checkpoint
from mergekit_ace.merge_config import Finding, check_config, check_keys, check_settings
from mergekit_ace.methods.base import TaskVectorMethod, sweep
from mergekit_ace.naming import ConfigError, FileError, in_bytes, listed
from mergekit_ace.planning import PlannedMerge, plan_merge, read_merge_config, read_yaml

MARGIN = 1.02  # of the result's size, for indices, tokenizers and the rest
PROCESS = 700_000_000  # bytes: python with torch, transformers and mergekit


@dataclass(frozen=True)
class MergeEstimate:
    """What a merge takes, if all experts have changed all tensors and all of them are refined.

    Attributes:
        operations: floating-point operations.
        memory: bytes of the process at its largest, about; without what the system caches of files.
        device_memory: bytes on the accelerator; None without one.
        read, written: bytes.
    """

    operations: float
    memory: int
    device_memory: int | None
    read: int
    written: int


@dataclass(frozen=True)
class Preflight:
    """Result of a check.

    Attributes:
        findings: errors first.
        estimate: what the merge takes; None where no plan was possible.
        models: lines on the method and the models.
    """

    findings: tuple[Finding, ...]
    estimate: MergeEstimate | None = None
    models: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(finding.level != "error" for finding in self.findings)

    @property
    def text(self) -> str:
        """All of it, for people."""
        errors = sum(finding.level == "error" for finding in self.findings)
        verdict = "nothing to complain about: the merge may start"
        if self.findings:
            verdict = f"errors: {errors}, warnings: {len(self.findings) - errors}"
        lines = [*(finding.text for finding in self.findings), verdict]
        if one := self.estimate:
            device = one.device_memory
            on_device = f", and {in_bytes(device)} on the device" if device is not None else ""
            lines += [
                f"  work  up to {one.operations:.2g} operations",
                f"memory  about {in_bytes(one.memory)}{on_device}",
                f"  disk  reads {in_bytes(one.read)}, writes {in_bytes(one.written)}",
            ]
        return "\n".join([*lines, "", *self.models])


def check_merge(
    path: Path,
    options: MergeOptions,
    out: Path | None = None,
    unplanned: Treatment | None = None,
) -> Preflight:
    """Check a config and its models by configs, tokenizers, headers and a few matrices of each.

    Args:
        out: where the result is to be written; the present folder's disk by default.
        unplanned: what the `mergekit-ace merge` that is about to start, and looks after the disk
            itself, does with tensors that mergekit does not plan; None for `mergekit-yaml`.
    """
    findings: list[Finding] = []
    try:
        config, source = read_merge_config(path)
    except ConfigError as error:
        with suppress(ConfigError):  # a misspelt `models:` is more than a missing one
            findings += check_keys(read_yaml(path)[0])
        return Preflight((Finding.error(str(error)), *findings))
    findings += check_config(config, source)
    checkpoints: dict[ModelReference, Checkpoint] = {}
    plan = estimate = None
    models = sorted(config.referenced_models(), key=lambda m: (m != config.base_model, str(m)))
    for model in models:
        try:
            checkpoints[model] = read_checkpoint(model)
        except FileError as error:
            findings.append(Finding.error(str(error)))
    if len(checkpoints) == len(models):
        findings += check_adapters(checkpoints, options, merged_first=unplanned is None)
        findings += check_checkpoints(checkpoints, config)
        with headers_only(list(checkpoints.values())):
            try:
                plan = plan_merge(config, source, options, checkpoints=checkpoints)
                extra, told = treat_unplanned(plan, checkpoints, unplanned or "error")
                if extra:
                    plan = plan_merge(config, source, options, extra, checkpoints=checkpoints)
                told += check_labels(plan, unplanned or "error")
                if all(finding.level != "error" for finding in told):
                    told += check_whole(plan, checkpoints)
            except Exception as error:  # mergekit raises whatever its parts do
                text = str(error) or type(error).__name__
                if isinstance(error, KeyError):  # mergekit looks a module up
                    text = f"the architecture has no part {text}; most have one, called `default`"
                told = [Finding.error(text)]
        findings += told
    if plan is not None:
        estimate = estimate_merge(plan, checkpoints)
        findings += check_tensors(plan.tensors, checkpoints)
        findings += check_padding(plan, checkpoints)
        # without copies, which know nothing of the method's parameters
        own = {t.name: plan.saves[t.name] for t in plan.tensors if t.method is plan.method}
        findings += check_settings(replace(plan, saves=own))
        if unplanned is None:
            findings += _check_mergekit_yaml(plan, estimate, out or Path("."))
    findings.sort(key=lambda finding: finding.level != "error")
    lines = list(_model_lines(config, checkpoints))
    if plan is not None:
        method = plan.method
        known = method.about if isinstance(method, TaskVectorMethod) else method.spec.pretty_name
        lines.insert(0, f"method  {known or config.merge_method}")
    return Preflight(tuple(findings), estimate, tuple(lines))


def _check_mergekit_yaml(
    plan: PlannedMerge, estimate: MergeEstimate, out: Path
) -> Iterator[Finding]:
    """Find what `mergekit-yaml` fails over at its end, rounds, or leaves out."""
    for model in sorted(plan.config.referenced_models(), key=str):
        path = model.model.path
        if path.count("/") < 2 and not path.startswith(("/", ".")) and Path(path).is_dir():
            yield Finding.warning(
                f"{path} is a folder here, but might be a model on the Hub: mergekit-yaml asks "
                "there in the end, and fails without a network",
                f"write ./{path}, or merge by mergekit-ace merge",
            )
    weights = [tensor.task.output_weight for tensor in plan.tensors]
    kept = [w.name for w in weights if w.force_dtype and safetensors_dtype(w.force_dtype)]
    if kept:
        yield Finding.warning(
            f"mergekit-yaml rounds {len(kept)} tensors that all models keep in a wider dtype than "
            f"the others: {listed(kept)}",
            "merge by mergekit-ace merge, which leaves them in it",
        )
    yield from check_model_files(plan)
    place = next(p for p in (out.absolute(), *out.absolute().parents) if p.exists())
    free, wanted = shutil.disk_usage(place).free, int(MARGIN * estimate.written)
    if free < wanted:
        yield Finding.error(
            f"the result takes {in_bytes(wanted)}, but {place} has {in_bytes(free)} left",
            "free some space, or write elsewhere",
        )


def estimate_merge(plan: PlannedMerge, checkpoints: Checkpoints) -> MergeEstimate:
    """Return what a merge takes, from the shapes of its tensors."""
    on_device = plan.options.device not in (None, "cpu")
    operations, read, written = 0.0, 0, 0
    peak = held = device = 0  # bytes: at the most, in the shard that is not written yet
    # as mergekit's executor sorts them
    for tensor in sorted(plan.tensors, key=lambda tensor: tensor.name):
        headers = planned_headers(tensor, checkpoints)
        header = headers.get(tensor.base) if tensor.base else next(iter(headers.values()), None)
        if header is None:
            continue
        method, work = tensor.method, sweep(header.shape, max(1, len(headers) - 1))
        if tensor.base and isinstance(tensor.task, MergeProducts):  # only the base's is read
            headers, work = {tensor.base: header}, sweep(header.shape, 1)
        elif isinstance(method, TaskVectorMethod):
            settings = tensor.settings
            if method.layouts:
                settings = replace(settings, layout=method.layout(settings, len(header.shape)))
            weights = zip(settings.experts, settings.weights, strict=True)
            experts = sum(weight != 0 for model, weight in weights if model in headers)
            work = method.work(settings, header.shape, experts)
        merged_in = safetensors_dtype(plan.config.dtype) or header.dtype
        written_in = safetensors_dtype(plan.config.out_dtype) or merged_in
        output = header.entries * item_size(written_in)
        inputs = len(headers) * header.entries * item_size(merged_in)
        working = work.working + 4 * header.entries  # with the result in float32
        held = 0 if held + output > plan.options.out_shard_size else held
        peak = max(peak, held + inputs + output + (0 if on_device else working))
        held += output
        device = max(device, inputs + working)
        operations += work.operations
        read += sum(one.bytes for one in headers.values())
        written += output
    return MergeEstimate(operations, PROCESS + peak, device if on_device else None, read, written)


def _model_lines(config: MergeConfiguration, checkpoints: Checkpoints) -> Iterator[str]:
    for model, checkpoint in checkpoints.items():
        role = "base" if model == config.base_model else "expert"
        dtypes = sorted({header.dtype for header in checkpoint.headers.values()})
        precision, size = checkpoint.precision, checkpoint.config.get("vocab_size")
        values = f" with {precision} values" if precision and precision not in dtypes else ""
        vocabulary = f", vocabulary {size}" if size else ""
        yield (
            f"{role:>6}  {model}: {len(checkpoint.headers)} tensors, {in_bytes(checkpoint.bytes)}, "
            f"{', '.join(dtypes) or 'unknown dtype'}{values}{vocabulary}"
        )
