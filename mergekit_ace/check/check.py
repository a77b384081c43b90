# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace check`: everything that can be known before a merge."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from mergekit import merge_methods
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_ace.check.estimate import MergeEstimate, estimate_merge
from mergekit_ace.check.loading import Treatment, check_model_files, treat_unplanned
from mergekit_ace.check.models import (
    check_adapters,
    check_checkpoints,
    check_padding,
    check_tensors,
    compare_shapes,
    safetensors_dtype,
)
from mergekit_ace.files.headers import DamagedFileError
from mergekit_ace.files.models import Checkpoints, headers_only, read_checkpoint
from mergekit_ace.merge_config import (
    Finding,
    check_config,
    check_keys,
    check_settings,
)
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.naming import in_bytes, listed
from mergekit_ace.planning import (
    ConfigError,
    PlannedMerge,
    UnplannedTensor,
    plan_merge,
    read_merge_config,
)

MARGIN = 1.02  # of the result's size, for indices, tokenizers and the rest


@dataclass(frozen=True)
class Preflight:
    """Result of a check.

    Attributes:
        findings: errors first.
        method: what the merge method does, and where to read more; its name if it is mergekit's.
        tensors: how many are merged; None where no plan was possible.
        estimate: what that takes; None where no plan was possible.
    """

    findings: tuple[Finding, ...]
    method: str = ""
    models: tuple[dict[str, Any], ...] = ()
    tensors: int | None = None
    estimate: MergeEstimate | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(finding.level != "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """Return the result for programs."""
        return {"ok": self.ok, **asdict(self)}


def check_merge(
    path: Path,
    options: MergeOptions,
    out: Path | None = None,
    unplanned: Treatment | None = None,
) -> Preflight:
    """Check a config and its models by configs, tokenizers, headers and a few matrices of each.

    Args:
        out: where the result is to be written; the present folder's disk by default.
        unplanned: what the `mergekit-ace merge` that is about to start does with tensors that
            mergekit does not plan. It looks after the disk itself. None for a merge by
            `mergekit-yaml`.
    """
    try:
        config, source = read_merge_config(path)
    except ConfigError as error:
        return Preflight((Finding.error("config", str(error)), *_check_unread(path)))
    by_mergekit = unplanned is None
    findings = check_config(config, source)
    checkpoints, lost = _read_all(config)
    findings += lost
    if by_mergekit:
        findings += _check_names(config)
    plan = estimate = None
    if not lost:  # nothing can be planned without them
        findings += check_adapters(checkpoints, options, merged_first=by_mergekit)
        findings += check_checkpoints(checkpoints, config)
        plan, told = _plan_all(config, source, options, checkpoints, unplanned or "error")
        findings += told
    if plan is not None:
        estimate = estimate_merge(plan, checkpoints)
        findings += _check_plan(plan, checkpoints)
        if by_mergekit:
            findings += _check_rounded(plan)
            findings += check_model_files(config, options)
            findings += _check_disk(estimate, out or Path("."))
    return Preflight(
        tuple(sorted(findings, key=lambda finding: finding.level != "error")),
        _about(config.merge_method),
        _facts(checkpoints, config),
        len(plan.tensors) if plan else None,
        estimate,
    )


def _check_unread(path: Path) -> list[Finding]:
    """Return what a config that mergekit does not accept holds beside: a misspelt `models:`."""
    try:
        return list(check_keys(path.read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return []


def _about(name: str) -> str:
    """Return what a merge method does."""
    try:
        method = merge_methods.get(name)
    except RuntimeError:
        return name
    if isinstance(method, TaskVectorMethod):
        return method.about
    return method.spec.pretty_name or name


def _read_all(config: MergeConfiguration) -> tuple[Checkpoints, list[Finding]]:
    checkpoints, lost = {}, []
    for model in sorted(config.referenced_models(), key=lambda m: (m != config.base_model, str(m))):
        try:
            checkpoints[model] = read_checkpoint(model)
        except DamagedFileError as error:
            lost.append(Finding.error("models", str(error)))
    return checkpoints, lost


def _check_names(config: MergeConfiguration) -> Iterator[Finding]:
    """Find folders whose names mergekit takes for names on the Hub when it writes the card."""
    for model in sorted(config.referenced_models(), key=str):
        path = model.model.path
        if path.count("/") < 2 and not path.startswith(("/", ".")) and Path(path).is_dir():
            yield Finding.warning(
                "models",
                f"{path} is a folder here, but might be a model on the Hub: mergekit-yaml asks "
                "there in the end, and fails without a network",
                f"write ./{path}, or merge by mergekit-ace merge",
            )


def _plan_all(
    config: MergeConfiguration,
    source: str,
    options: MergeOptions,
    checkpoints: Checkpoints,
    unplanned: Treatment,
) -> tuple[PlannedMerge | None, list[Finding]]:
    """Plan a merge, with the tensors that mergekit leaves out where they are to be treated."""
    plan, findings = _plan(config, source, options, checkpoints)
    if plan is None:
        return None, findings
    extra, told = treat_unplanned(plan, checkpoints, unplanned)
    if extra:
        plan, findings = _plan(config, source, options, checkpoints, extra)
    return plan, findings + told


def _plan(
    config: MergeConfiguration,
    source: str,
    options: MergeOptions,
    checkpoints: Checkpoints,
    unplanned: Sequence[UnplannedTensor] = (),
) -> tuple[PlannedMerge | None, list[Finding]]:
    """Return mergekit's own plan, with what the merge methods say while it is made."""
    with headers_only(list(checkpoints.values())), _warnings() as warnings:
        try:
            plan = plan_merge(config, source, options, unplanned, checkpoints=checkpoints)
        except Exception as error:  # mergekit raises whatever its parts do
            text = str(error) or type(error).__name__
            if text.startswith("Unimplemented merge method"):
                return None, []  # `check_config` has said so
            if isinstance(error, KeyError):  # mergekit looks a module up
                text = f"the architecture has no part {text}; most have one, called `default`"
            return None, [Finding.error("plan", text)]
    return plan, [Finding.warning("plan", message) for message in dict.fromkeys(warnings)]


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Keep what this package logs as warnings, instead of showing it.

    Without vocabularies, which `compare_shapes` judges by the whole plan.
    """
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            ours = record.name.partition(".")[0] == __name__.partition(".")[0]
            if ours and getattr(record, "subject", "") != "vocabularies":
                messages.append(record.getMessage())

    root, keep = logging.getLogger(), Keep(logging.WARNING)
    others = root.handlers[:]
    root.handlers[:] = [keep]
    try:
        yield messages
    finally:
        root.handlers[:] = others


def _check_plan(plan: PlannedMerge, checkpoints: Checkpoints) -> Iterator[Finding]:
    yield from check_tensors(plan.tensors, checkpoints)
    yield from compare_shapes(plan.tensors, checkpoints, plan.config)
    yield from check_padding(plan, checkpoints)
    # without copies, which know nothing of the method's parameters
    own = {tensor.name for tensor in plan.tensors if tensor.method is plan.method}
    saves = {name: save for name, save in plan.saves.items() if name in own}
    yield from check_settings(replace(plan, saves=saves))


def _check_rounded(plan: PlannedMerge) -> Iterator[Finding]:
    """Find tensors that mergekit-yaml rounds though all models store them in a wider dtype."""
    weights = [tensor.task.output_weight for tensor in plan.tensors]
    kept = [w.name for w in weights if w.force_dtype and safetensors_dtype(w.force_dtype)]
    if kept:
        yield Finding.warning(
            "dtypes",
            f"mergekit-yaml rounds {len(kept)} tensors that all models keep in a wider dtype than "
            f"the others: {listed(kept)}",
            "merge by mergekit-ace merge, which leaves them in it",
        )


def _check_disk(estimate: MergeEstimate, out: Path) -> Iterator[Finding]:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    wanted = int(MARGIN * estimate.written)
    if free < wanted:
        yield Finding.error(
            "disk",
            f"the result takes {in_bytes(wanted)}, but {place} has {in_bytes(free)} left",
            "free some space, or write elsewhere",
        )


def _facts(checkpoints: Checkpoints, config: MergeConfiguration) -> tuple[dict[str, Any], ...]:
    return tuple(
        {
            "model": str(model),
            "role": "base" if model == config.base_model else "expert",
            "tensors": len(checkpoint.index.tensor_paths),
            "bytes": checkpoint.bytes,
            "dtypes": sorted({header.dtype for header in checkpoint.headers.values()}),
            "precision": checkpoint.precision or None,
            "vocabulary": checkpoint.config.get("vocab_size"),
            "place": str(checkpoint.folder) if checkpoint.folder else "on the Hub",
        }
        for model, checkpoint in checkpoints.items()
    )


def result_text(result: Preflight) -> str:
    """Return a check's result for people: the verdict, what the merge takes, and its models."""
    errors = sum(finding.level == "error" for finding in result.findings)
    verdict = "nothing to complain about: the merge may start"
    if result.findings:
        verdict = f"errors: {errors}, warnings: {len(result.findings) - errors}"
    lines = [*(finding.text for finding in result.findings), verdict]
    if result.estimate is not None:
        lines += _estimate_lines(result.estimate)
    lines += ["", f"method  {result.method}"] if result.method else [""]
    return "\n".join([*lines, *map(_model_line, result.models)])


def _estimate_lines(estimate: MergeEstimate) -> list[str]:
    device = estimate.device_memory
    return [
        f"  work  up to {estimate.operations:.2g} operations",
        f"memory  about {in_bytes(estimate.memory)}"
        + (f", and {in_bytes(device)} on the device" if device is not None else ""),
        f"  disk  reads {in_bytes(estimate.read)}, writes {in_bytes(estimate.written)}",
    ]


def _model_line(model: dict[str, Any]) -> str:
    dtypes, precision = model["dtypes"], model["precision"]
    values = f" with {precision} values" if precision not in (None, *dtypes) else ""
    vocabulary = f", vocabulary {model['vocabulary']}" if model["vocabulary"] else ""
    return (
        f"{model['role']:>6}  {model['model']}: {model['tensors']} tensors, "
        f"{in_bytes(model['bytes'])}, {', '.join(dtypes) or 'unknown dtype'}{values}{vocabulary}"
    )
