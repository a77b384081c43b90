# SPDX-License-Identifier: Apache-2.0
"""The model card of a merged adapter, and the name of the base in it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import yaml
from mergekit import merge_methods

from mergekit_ace.adapters.adapter_plan import AdapterPlan
from mergekit_ace.files import package_versions
from mergekit_ace.methods.base import TaskVectorMethod
from mergekit_ace.methods.report_lines import REPORTED_PACKAGES
from mergekit_ace.preflight.checkpoint_rules import same_name
from mergekit_ace.report.markdown import markdown_text
from mergekit_ace.report.tables import title_of


def published_base(plan: AdapterPlan) -> tuple[str, str | None]:
    """Return the name and the revision of the base, as others know it where that can be told.

    A folder is known on this machine alone; if all adapters name one model of the Hub that ends
    like the folder, that is it.
    """
    path, revision = plan.base.model.path, plan.base.model.revision
    told = {(a.config.base_model_name_or_path, a.config.revision) for a in plan.adapters}
    if Path(path).expanduser().is_dir() and len(told) == 1:
        ((name, other),) = told
        if name and not Path(name).expanduser().exists() and same_name(name, path):
            return name, other
    return path, revision


def card_text(
    name: str, plan: AdapterPlan, tau: Sequence[float], ranks: Sequence[int], lost: float
) -> str:
    """Return the model card.

    Args:
        name: of the adapter.
        plan: of its merge.
        tau: ‖Δ_t‖² of every expert over all tensors; empty where all are held whole.
        ranks: of all modules.
        lost: the share of ‖X‖² that was cut off, 0 to 1.
    """
    base, _ = published_base(plan)
    head = {
        "base_model": base,
        "library_name": "peft",
        "tags": ["mergekit", "mergekit-ace", "merge", "lora", "peft"],
    }
    method = merge_methods.get(plan.merge.config.merge_method)
    title, url = title_of(method.spec.name), method.spec.reference_url
    linked = f"[{title}]({url})" if url else title
    versions = package_versions(*REPORTED_PACKAGES, "peft")
    listed = ", ".join(f"{package} {number}" for package, number in versions.items())
    parts = [
        f"---\n{yaml.safe_dump(head, sort_keys=False).strip()}\n---",
        f"# {markdown_text(name)}",
        f"A LoRA adapter of {markdown_text(base)}, merged from {len(plan.adapters)} adapters by "
        f"{linked}, within the span of their factors. {_result(ranks, lost)}",
        _table(plan, tau),
        f"Made by `mergekit-ace adapter` ({markdown_text(listed)}) from this configuration:",
        f"```yaml\n{plan.merge.source.strip()}\n```",
    ]
    if isinstance(method, TaskVectorMethod):
        parts += [f"```bibtex\n{citation.bibtex}\n```" for citation in method.citations]
    return "\n\n".join(parts) + "\n"


def _result(ranks: Sequence[int], lost: float) -> str:
    if not ranks:
        return ""
    low, high = min(ranks), max(ranks)
    text = f"Its {len(ranks)} modules have rank {low}" + (f" to {high}." if high > low else ".")
    if lost > 1e-9:
        text += f" That cuts off {lost:.2%} of the merged change (of its squared norm)."
    return text


def _table(plan: AdapterPlan, tau: Sequence[float]) -> str:
    total = sum(tau) or 1.0
    rows = ["| adapter | rank | share of all change |", "|---|---|---|"]
    for t, adapter in enumerate(plan.adapters_of.values()):
        if adapter is None:
            continue
        ranks = {change.rank for change in adapter.changes.values() if change.rank}
        span = f"{min(ranks)} to {max(ranks)}" if len(ranks) > 1 else str(*ranks)
        share = f"{tau[t] / total:.0%}" if tau else ""
        rows.append(f"| {markdown_text(adapter.name)} | {span} | {share} |")
    return "\n".join(rows)
