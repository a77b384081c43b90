# SPDX-License-Identifier: Apache-2.0
"""What `mergekit-yaml` leaves out of a result: files are added, tensors that are gone are named."""

from __future__ import annotations

from pathlib import Path

import click
from mergekit.config import MergeConfiguration

from mergekit_ace.model_files import add_model_files, config_donor
from mergekit_ace.planning import read_merge_config
from mergekit_ace.preflight.loading import NotLoadedError, merged_model, verify_model
from mergekit_ace.report.jsonl import ReportError


def complete_result(folder: Path) -> None:
    """Add the files that a result lacks, say which, and check that transformers loads it whole.

    Raises:
        ReportError: there is no config, or tensors are missing.
    """
    config = merged_config(folder)
    added = add_model_files(config, folder, beside=folder.parent)
    for name, model in added.items():
        click.echo(f"added {name} of {model}")
    if not added:
        click.echo(f"{folder} has all files that its models have beside their weights")
    problem = _problem(config, folder)
    if problem:
        raise ReportError(
            f"{folder} is no model that transformers loads whole: {problem}. Merge again with "
            "`mergekit-ace merge --unplanned merge` or `--unplanned base`"
        )


def merged_config(folder: Path) -> MergeConfiguration:
    """Return the config that a result was made from.

    Raises:
        ReportError: there is none.
    """
    if not (folder / "mergekit_config.yml").is_file():
        raise ReportError(f"{folder} holds no mergekit_config.yml: is it what mergekit wrote?")
    return read_merge_config(folder / "mergekit_config.yml")[0]


def _problem(config: MergeConfiguration, folder: Path) -> str:
    """Return what is wrong with the weights; empty where the base is not here to compare with."""
    path = Path(config_donor(config).model.path).expanduser()
    donor = next((place for place in (path, folder.parent / path) if place.is_dir()), None)
    if donor is None:
        return ""
    try:
        return verify_model(folder, merged_model(donor), donor, trust_remote_code=False)
    except (NotLoadedError, OSError, RuntimeError, ValueError):
        return ""  # weights of the base that are gone, an architecture with code of its own
