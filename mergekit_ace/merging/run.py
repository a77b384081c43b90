# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace merge`: claims the directory, plans, has shards computed, completes the model."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import click
import torch
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from tqdm import tqdm
from transformers import AutoTokenizer

from mergekit_ace.check.loading import merged_model, quiet_transformers, verify_model
from mergekit_ace.files.checkpoints import check_references, config_donor, own_loaders
from mergekit_ace.files.saving import differences, locked, occupied
from mergekit_ace.merging.output import Manifest, OutputFolder, check_own, say
from mergekit_ace.merging.plan import build_tokenizer, fingerprint, input_files, plan_run
from mergekit_ace.merging.shards import MergeJob, Shard, divide_into_shards
from mergekit_ace.merging.workers import Compute, find_workers
from mergekit_ace.methods.base import flush_notices, notice
from mergekit_ace.methods.storage import model_class
from mergekit_ace.naming import ConfigError
from mergekit_ace.planning import PlannedMerge, Treatment, estimate_merge


def run_shards(
    config: Path,
    out: Path | str,
    options: MergeOptions,
    *,
    workers: int = 1,
    ray: str | None = None,
    overwrite: bool | Literal["changed"] = False,
    strict: bool = True,
    unplanned: Treatment = "error",
) -> PlannedMerge:
    """Merge shard by shard, as `mergekit-ace merge` does; errors say what to do about them.

    Args:
        workers: processes that compute, or tasks of a cluster; 1 without a cluster: this process.
        ray: address of a Ray cluster, `auto` for the one at hand.
        overwrite: drop whatever merge or model is there, instead of going on with it; `changed`:
            only a merge whose config or inputs have changed.
        strict: stop at errors of the check before and after the merge.
        unplanned: treatment of tensors that mergekit's architecture does not plan.
    """
    start, path = time.monotonic(), Path(os.path.abspath(out))
    side_by_side = options.multi_gpu or options.async_write or options.write_threads != 1
    if side_by_side or not options.safe_serialization:
        raise ConfigError(
            "leave out --multi-gpu, --gpu-rich, --async-write, --write-threads (give --workers N, "
            "with --cuda for a GPU each) and --no-safe-serialization"
        )
    anew = overwrite is True
    check_own(path, overwrite=anew)
    with locked(path), own_loaders():
        known = None if anew else Manifest.read(path)
        end = "Nothing was merged" + ("; --no-check leaves this check out" if strict else "")
        plan, checkpoints = plan_run(config, options, unplanned, strict=strict, end=end)
        identity = fingerprint(plan)
        if known and (changed := differences(known.identity, identity)):
            if not overwrite:
                raise occupied(path, "a merge that cannot be resumed", changed)
            known, anew = None, True
        folder = OutputFolder(path, known or Manifest(identity=identity))
        folder.check_inputs(input_files(plan), plan.named_paths("report"))
        tokenizer = build_tokenizer(plan)
        shards = divide_into_shards(plan, checkpoints, tokenizer)
        edited = folder.find_finished(plan, shards) if known else set()
        todo = [shard for shard in shards if shard.file not in folder.manifest.files]
        if not folder.manifest.complete:
            memory = estimate_merge(plan, checkpoints).memory if ray else 0
            models = {m: one.index.base_path for m, one in LoaderCache().loaders.items()}
            job = MergeJob(options, plan.tokenizer_task, tokenizer, str(folder.scratch), models)
            count, address = (workers, ray) if todo else (1, None)
            with find_workers(job, count, address, memory) as compute:
                folder.begin(overwrite=anew, kept=edited)
                _compute(folder, plan, todo, compute)
            folder.complete(plan, tokenizer, shards, edited)
        shutil.rmtree(folder.scratch, ignore_errors=True)
        _check_result(path, plan, strict=strict)
        took = tqdm.format_interval(round(time.monotonic() - start))
        made = f"{len(todo)} shard{'s' * (len(todo) > 1)} in {took}; " if todo else ""
        say(plan, f"{made}{path} is complete")
    return plan


def _compute(
    folder: OutputFolder, plan: PlannedMerge, todo: Sequence[Shard], compute: Compute
) -> None:
    """Have shards computed, and enter them; nobody else touches the directory and the manifest."""
    needed, free = sum(shard.bytes for shard in todo), shutil.disk_usage(folder.path).free
    if 0 < free < needed:  # some network file systems tell nothing
        more, left = f"{needed / 1e9:.1f} GB more", f"{free / 1e9:.1f} GB free"
        raise ConfigError(f"{folder.path} needs {more}, and its disk has {left}; make room")
    quiet, done = plan.options.quiet or not todo, 0
    bar = tqdm(desc="merging", total=needed, unit="B", unit_scale=True, leave=False, disable=quiet)
    with bar, closing(compute(todo, bar)) as results:
        for shard, result in results:
            if result.error:
                check_references(plan.config.referenced_models())  # names a file that is the cause
                raise ConfigError(
                    f"{shard.file}: {result.error}\nWhat is finished is kept: give the same "
                    "command again, or, with another model or config, --overwrite to begin anew"
                )
            folder.take(shard, result)
            for text, count in result.notices.items():
                notice(text, count)
            done += shard.bytes
            bar.update(done - bar.n)
    LoaderCache().flush_all()
    flush_notices()


def _check_result(folder: Path, plan: PlannedMerge, *, strict: bool) -> None:
    """Raise a `ConfigError`, or warn, if transformers would not load all of the result."""
    donor = Path(LoaderCache().get(config_donor(plan.config)).index.base_path)
    try:
        problem = verify_model(folder, donor, trust_remote_code=plan.options.trust_remote_code)
    except ConfigError as error:
        say(plan, f"whether the result loads was not checked: {str(error).splitlines()[0]}")
        return
    text = f"{folder} is no model that transformers loads whole: {problem}. The files stay"
    if problem and strict:
        raise ConfigError(text)
    if problem:
        click.echo(f"warning: {text}", err=True)


def try_prompt(folder: Path, plan: PlannedMerge, prompt: str) -> None:
    """Let the base of a merge and its result continue a prompt, and print each with its loss.

    The loss is the mean per token, in nats, of the prompt and the base's continuation; where an
    encoder reads the prompt, of the continuation alone.
    """
    trust, device = plan.options.trust_remote_code, plan.options.device or "cpu"
    expected = None
    try:
        for reference in (config_donor(plan.config), merged_model(folder)):
            source = reference.model  # of an adapter: its base
            where: dict[str, Any] = {"revision": source.revision, "trust_remote_code": trust}
            where["cache_dir"] = plan.options.transformers_cache
            kind: Any = model_class(reference.config(trust), trust)
            with quiet_transformers(), torch.inference_mode():  # one of them is in memory at a time
                tokenizer: Any = AutoTokenizer.from_pretrained(source.path, **where)
                model = kind.from_pretrained(source.path, dtype="auto", **where).eval().to(device)
                inputs = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
                mask, decoding = torch.ones_like(inputs), {"do_sample": False, "num_beams": 1}
                output = model.generate(inputs, attention_mask=mask, max_new_tokens=20, **decoding)
                encoder = model.config.is_encoder_decoder
                start = 0 if encoder else inputs.shape[1]
                said = tokenizer.decode(output[0, start:], skip_special_tokens=True)
                expected = said if expected is None else expected
                text = (expected or prompt) if encoder else prompt + expected
                labels = tokenizer(text, return_tensors="pt").input_ids.to(device)
                loss = float(model(inputs if encoder else labels, labels=labels).loss)
            click.echo(f"{reference}: {said!r}, loss per token {loss:.5g}")
    except Exception as error:  # of many kinds, from model classes, tokenizers and the prompt
        said = "the merge is complete, and --try failed, which needs a model that generates text"
        raise ConfigError(f"{said} and its tokenizer: {error}") from error
