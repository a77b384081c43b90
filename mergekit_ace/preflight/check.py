# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace check`: everything that can be known before a merge."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml
from mergekit import merge_methods
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.options import MergeOptions

from mergekit_ace.headers import DamagedFileError
from mergekit_ace.planning import ConfigError, PlannedMerge, plan_merge, read_merge_config
from mergekit_ace.preflight.calibration import calibrate
from mergekit_ace.preflight.checkpoints import Checkpoint, headers_only, read_checkpoint
from mergekit_ace.preflight.coefficients import check_coefficients
from mergekit_ace.preflight.estimate import Estimate, estimate_merge
from mergekit_ace.preflight.findings import Finding
from mergekit_ace.preflight.models import (
    check_adapters,
    check_configs,
    check_heads,
    check_tokenizers,
)
from mergekit_ace.preflight.settings import check_settings
from mergekit_ace.preflight.tensors import check_dtypes, check_shapes, check_tensors

MARGIN = 1.02  # of the result's size, for indices, tokenizers and the rest


@dataclass(frozen=True)
class Preflight:
    """The result.

    Attributes:
        findings: errors first.
        models: what is known of each.
        tensors: how many are merged; None where no plan was possible.
        estimate: what that takes; None where no plan was possible.
    """

    findings: tuple[Finding, ...]
    models: tuple[dict[str, Any], ...] = ()
    tensors: int | None = None
    estimate: Estimate | None = None

    @property
    def ok(self) -> bool:
        """Whether there is no error."""
        return all(finding.level != "error" for finding in self.findings)

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {"ok": self.ok, **asdict(self)}


def check_merge(path: Path, options: MergeOptions, out: Path | None = None) -> Preflight:
    """Check a config and its models; only configs, tokenizers and headers are read.

    Args:
        path: of the config.
        options: mergekit's flags.
        out: where the result is to be written; the present folder's disk by default.
    """
    try:
        config, source = read_merge_config(path)
    except ConfigError as error:
        return Preflight((Finding("error", "config", str(error)),))
    findings: list[Finding] = []
    try:
        spec = merge_methods.get(config.merge_method).spec
        findings += check_settings(yaml.safe_load(source), spec)
    except RuntimeError:
        known = ", ".join(sorted(m.spec.name for m in merge_methods.registered_methods()))
        findings.append(
            Finding("error", "config", f"there is no method {config.merge_method!r}", known)
        )
    checkpoints, lost = _read_all(config)
    findings += lost
    if lost:  # nothing can be planned without them
        return Preflight(_sorted(findings), _facts(checkpoints, config))
    findings += check_adapters(checkpoints, options)
    findings += check_dtypes(checkpoints, config)
    findings += check_heads(checkpoints, config.base_model)
    findings += check_configs(checkpoints, config.base_model)
    findings += check_tokenizers(checkpoints, config.base_model, config)
    plan, told = _plan(config, source, options, checkpoints)
    findings += told
    if plan is None:
        return Preflight(_sorted(findings), _facts(checkpoints, config))
    findings += check_tensors(plan.tensors, checkpoints)
    findings += check_shapes(plan.tensors, checkpoints, config)
    findings += check_coefficients(plan)
    shards = [Path(h.file) for c in checkpoints.values() if c.folder for h in c.headers.values()]
    largest = max(set(shards), key=lambda shard: shard.stat().st_size, default=None)
    estimate = estimate_merge(plan, checkpoints, calibrate(options.device or "cpu", largest))
    findings += _check_disk(estimate, out or Path("."))
    return Preflight(_sorted(findings), _facts(checkpoints, config), len(plan.tensors), estimate)


def _read_all(
    config: MergeConfiguration,
) -> tuple[dict[ModelReference, Checkpoint], list[Finding]]:
    checkpoints, lost = {}, []
    for model in sorted(config.referenced_models(), key=lambda m: (m != config.base_model, str(m))):
        try:
            checkpoints[model] = read_checkpoint(model)
        except DamagedFileError as error:
            lost.append(Finding("error", "models", str(error), "correct the name, or get it again"))
    return checkpoints, lost


def _plan(
    config: MergeConfiguration,
    source: str,
    options: MergeOptions,
    checkpoints: Mapping[ModelReference, Checkpoint],
) -> tuple[PlannedMerge | None, list[Finding]]:
    """mergekit's own plan, with what it and the merge methods say while they make it."""
    with headers_only(list(checkpoints.values())), _warnings() as warnings:
        try:
            plan = plan_merge(config, source, options)
        except Exception as error:  # mergekit raises whatever its parts do
            text = str(error) or type(error).__name__
            return None, [Finding("error", "plan", text)]
    ours = [message for message in warnings if message.startswith(("ace:", "statsmerging:"))]
    # what `check_shapes` says itself
    told = [message for message in ours if "has a vocabulary of" not in message]
    return plan, [Finding("warning", "plan", message) for message in dict.fromkeys(told)]


@contextmanager
def _warnings() -> Iterator[list[str]]:
    """Messages that are logged as warnings, kept instead of shown."""
    messages: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage())

    root, keep = logging.getLogger(), Keep(logging.WARNING)
    others = root.handlers[:]
    root.handlers[:] = [keep]
    try:
        yield messages
    finally:
        root.handlers[:] = others


def _check_disk(estimate: Estimate, out: Path) -> Iterator[Finding]:
    place = out.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    wanted = int(MARGIN * estimate.written)
    if free < wanted:
        yield Finding(
            "error",
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
            "vocabulary": checkpoint.config.get("vocab_size"),
            "place": str(checkpoint.folder) if checkpoint.folder else "on the Hub",
        }
        for model, checkpoint in checkpoints.items()
    )


def _sorted(findings: list[Finding]) -> tuple[Finding, ...]:
    return tuple(sorted(findings, key=lambda finding: finding.level != "error"))


def in_bytes(count: float) -> str:
    """Bytes in words."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
