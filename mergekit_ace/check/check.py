# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace check`: everything that can be known before a merge."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_ace.check.adapter_rules import check_adapters
from mergekit_ace.check.checkpoint_rules import (
    check_class_names,
    check_configs,
    check_heads,
    check_tensors,
    compare_shapes,
)
from mergekit_ace.check.checkpoints import Checkpoint, headers_only, read_checkpoint
from mergekit_ace.check.config_keys import check_keys, nearest_method
from mergekit_ace.check.dtype_rules import check_dtypes, check_tensor_dtypes
from mergekit_ace.check.estimate import (
    NOMINAL,
    MergeEstimate,
    calibrate,
    estimate_merge,
    in_bytes,
    in_time,
)
from mergekit_ace.check.findings import Finding
from mergekit_ace.check.reach_rules import check_method_settings, check_reach
from mergekit_ace.check.tokenizer_rules import check_tokenizers
from mergekit_ace.check.unplanned_rules import (
    Treatment,
    check_model_files,
    find_unplanned,
    treat_unplanned,
)
from mergekit_ace.check.value_rules import check_values
from mergekit_ace.files.headers import DamagedFileError
from mergekit_ace.methods.base import TaskVectorMethod
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
            mergekit does not plan. It looks after the disk itself, and needs no estimate of time.
            None for a merge by `mergekit-yaml`.
    """
    try:
        config, source = read_merge_config(path)
    except ConfigError as error:
        return Preflight((Finding.error("config", str(error)), *_check_unread(path)))
    method, findings = check_method(config, source)
    findings += check_values(config)
    checkpoints, lost = _read_all(config)
    known: dict[str, Any] = {"method": method, "models": _facts(checkpoints, config)}
    findings += lost
    if unplanned is None:
        findings += _check_names(config)
    if lost:  # nothing can be planned without them
        return Preflight(_sorted(findings), **known)
    findings += check_adapters(checkpoints, options, merged_first=unplanned is None)
    findings += check_dtypes(checkpoints, config)
    findings += check_heads(checkpoints, config.base_model)
    findings += check_configs(checkpoints, config.base_model)
    findings += check_class_names(checkpoints)
    findings += check_tokenizers(checkpoints, config)
    plan, told = _plan(config, source, options, checkpoints)
    findings += told
    if plan is None:
        return Preflight(_sorted(findings), **known)
    left = find_unplanned(plan, checkpoints)
    extra, told = treat_unplanned(left, unplanned or "error", plan.tensors, checkpoints)
    findings += told
    if extra:
        plan, told = _plan(config, source, options, checkpoints, extra)
        if plan is None:
            return Preflight(_sorted(findings + told), **known)
    findings += check_tensors(plan.tensors, checkpoints)
    findings += compare_shapes(plan.tensors, checkpoints, config)
    findings += check_tensor_dtypes(plan.tensors, checkpoints)
    # without copies, which know nothing of the method's parameters
    own = {t.name for t in plan.tensors if t.method is plan.method}
    merged = replace(plan, saves={name: s for name, s in plan.saves.items() if name in own})
    findings += check_reach(merged)
    rates = calibrate(options.device or "cpu") if unplanned is None else NOMINAL
    estimate = estimate_merge(plan, checkpoints, rates)
    findings += check_method_settings(merged)
    if unplanned is None:
        findings += check_model_files(config, options)
        findings += _check_disk(estimate, out or Path("."))
    return Preflight(_sorted(findings), **known, tensors=len(plan.tensors), estimate=estimate)


def check_method(config: MergeConfiguration, source: str) -> tuple[str, list[Finding]]:
    """Return what the merge method does, and what is wrong with its settings."""
    try:
        method = merge_methods.get(config.merge_method)
    except RuntimeError:
        name = config.merge_method
        finding = Finding.error("config", f"there is no method {name!r}", nearest_method(name))
        return name, [finding, *check_keys(source, None)]
    spec = method.spec
    about = method.about if isinstance(method, TaskVectorMethod) else spec.pretty_name or spec.name
    return about, list(check_keys(source, spec))


def _check_unread(path: Path) -> list[Finding]:
    """Return what a config that mergekit does not accept holds beside: a misspelt `models:`."""
    try:
        return list(check_keys(path.read_text(encoding="utf-8"), None))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, AttributeError):  # no YAML, or no mapping
        return []


def _read_all(
    config: MergeConfiguration,
) -> tuple[dict[ModelReference, Checkpoint], list[Finding]]:
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


def _plan(
    config: MergeConfiguration,
    source: str,
    options: MergeOptions,
    checkpoints: Mapping[ModelReference, Checkpoint],
    unplanned: Sequence[UnplannedTensor] = (),
) -> tuple[PlannedMerge | None, list[Finding]]:
    """Return mergekit's own plan, with what the merge methods say while it is made."""
    with headers_only(list(checkpoints.values())), _warnings() as warnings:
        try:
            plan = plan_merge(config, source, options, unplanned)
        except Exception as error:  # mergekit raises whatever its parts do
            text = str(error) or type(error).__name__
            if text.startswith("Unimplemented merge method"):
                return None, []  # `check_method` has said so
            if isinstance(error, KeyError):  # mergekit looks a module up
                text = f"the architecture has no part {text}; most have one, called `default`"
            return None, [Finding.error("plan", text)]
    return plan, [Finding.warning("plan", message) for message in dict.fromkeys(warnings)]


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Keep what this package logs as warnings, instead of showing it.

    Without vocabularies: `compare_shapes` says those itself, once it is known whether they differ
    in the merge.
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


def _facts(
    checkpoints: Mapping[ModelReference, Checkpoint], config: MergeConfiguration
) -> tuple[dict[str, Any], ...]:
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


def _sorted(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.level != "error"))


def result_text(result: Preflight) -> str:
    """Return a check's result for people."""
    return "\n".join(_text_lines(result))


def _text_lines(result: Preflight) -> Iterator[str]:
    for finding in result.findings:
        yield finding.text
    errors = sum(finding.level == "error" for finding in result.findings)
    warnings = len(result.findings) - errors
    yield (
        f"errors: {errors}, warnings: {warnings}"
        if result.findings
        else "nothing to complain about: the merge may start"
    )
    if result.estimate is not None:
        yield from _estimate_lines(result.estimate)
    yield ""
    if result.method:
        yield f"method  {result.method}"
    for model in result.models:
        precision = model["precision"]
        yield (
            f"{model['role']:>6}  {model['model']}: {model['tensors']} tensors, "
            f"{in_bytes(model['bytes'])}, {', '.join(model['dtypes']) or 'unknown dtype'}"
            + (f" with {precision} values" if precision not in (None, *model["dtypes"]) else "")
            + (f", vocabulary {model['vocabulary']}" if model["vocabulary"] else "")
        )


def _estimate_lines(estimate: MergeEstimate) -> Iterator[str]:
    if estimate.seconds is not None:
        fast, slow = (in_time(seconds) for seconds in estimate.seconds)
        yield f"  time  about {fast}" + (f", {slow} if all is refined" if slow != fast else "")
    device = estimate.device_memory
    yield f"memory  about {in_bytes(estimate.memory)}" + (
        f", and {in_bytes(device)} on the device" if device is not None else ""
    )
    yield f"  disk  reads {in_bytes(estimate.read)}, writes {in_bytes(estimate.written)}"
