# SPDX-License-Identifier: Apache-2.0
"""What makes shards a model: index, config, tokenizer and model card, as `mergekit-yaml` has them.

All of it is written below `.merging/` first and then moved into place, `config.json` last.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import uuid
from importlib.metadata import version
from pathlib import Path

from mergekit.card import generate_card

from mergekit_ace.files import flush_to_disk
from mergekit_ace.merging.folder import MARKS, OutputFolder
from mergekit_ace.merging.job import MergeJob, MergePlan
from mergekit_ace.merging.manifest import Manifest
from mergekit_ace.merging.output_config import set_vocabulary
from mergekit_ace.merging.shards import index_name
from mergekit_ace.merging.tokenizer_files import copy_tokenizer, donor_folder, set_chat_template

LOG = logging.getLogger(__name__)


def finish_model(
    folder: OutputFolder, name: str, job: MergeJob, plan: MergePlan, manifest: Manifest
) -> None:
    """Complete a directory in which all shards are finished.

    Args:
        folder: the directory.
        name: its name, for the card.
        job, plan: of the merge.
        manifest: with all shards finished.
    """
    staging = folder.scratch / f"finish-{uuid.uuid4().hex}"
    staging.mkdir()
    write_index(staging, manifest, safetensors=job.merge_options.safe_serialization)
    _write_config(staging, job, plan)
    if job.merge_options.write_model_card:
        _write_card(staging, name, job)
    _write_tokenizer(staging, job)
    _copy_along(staging, job, plan)
    files = [path.relative_to(staging) for path in sorted(staging.rglob("*")) if path.is_file()]
    for path in files:
        flush_to_disk(staging / path)
    ranks = {name: rank for rank, name in enumerate(reversed(MARKS), start=1)}
    for path in sorted(files, key=lambda path: ranks.get(str(path), 0)):
        (folder.path / path).parent.mkdir(parents=True, exist_ok=True)
        folder.move_in(staging / path, str(path))


def write_index(staging: Path, manifest: Manifest, *, safetensors: bool) -> None:
    """Which file holds which tensor; only where there is more than one."""
    if len(manifest.shards) < 2:
        return
    places, total = {}, 0
    for entry in manifest.shards:
        tensors = entry.finished.tensors if entry.finished else {}
        places |= dict.fromkeys(tensors, entry.file)
        total += sum(tensors.values())
    metadata = {"total_size": total, "mergekit_version": version("mergekit")}
    text = json.dumps({"metadata": metadata, "weight_map": places}, indent=2)
    (staging / index_name(safetensors=safetensors)).write_text(text, encoding="utf-8")


def _write_config(staging: Path, job: MergeJob, plan: MergePlan) -> None:
    if job.tokenizer_info is not None:
        tokenizer = job.tokenizer_info.tokenizer
        set_vocabulary(plan.out_config, plan.architecture, tokenizer, job.vocabulary_multiple)
    plan.out_config.save_pretrained(staging)


def _write_card(staging: Path, name: str, job: MergeJob) -> None:
    card = generate_card(config=job.config(), config_yaml=job.source, name=name)
    (staging / "README.md").write_text(card, encoding="utf-8")
    (staging / "mergekit_config.yml").write_text(job.source, encoding="utf-8")


def _write_tokenizer(staging: Path, job: MergeJob) -> None:
    options, config = job.merge_options, job.config()
    if job.tokenizer_info is not None:
        tokenizer = job.tokenizer_info.tokenizer
        set_chat_template(tokenizer, config)
        tokenizer.save_pretrained(staging)
    elif options.copy_tokenizer:
        try:
            copy_tokenizer(config, staging, options)
        except Exception as error:  # as mergekit: the weights are worth keeping without it
            LOG.error(
                "The tokenizer could not be copied (%s). The merge is complete without it: copy "
                "one into %s",
                (str(error) or type(error).__name__).splitlines()[0],
                staging.parent.parent,
            )
    elif config.chat_template:
        LOG.warning("There is no tokenizer in the result, so its chat_template: is not saved")


def _copy_along(staging: Path, job: MergeJob, plan: MergePlan) -> None:
    donor = donor_folder(job.config(), job.merge_options)
    for name in plan.architecture.tagalong_files or ():
        source = os.path.join(donor, name)
        if os.path.exists(source):
            shutil.copy(source, staging / name)
