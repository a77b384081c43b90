# SPDX-License-Identifier: Apache-2.0
"""The driver of a merge: claims the directory, plans, has shards computed, completes the model."""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import closing, nullcontext, redirect_stdout
from dataclasses import replace
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import click
import torch
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.tokenizer import TokenizerInfo

from mergekit_ace.adapters.adapter_plan import base_of
from mergekit_ace.adapters.adapter_tasks import show_bases
from mergekit_ace.files import differences, package_versions
from mergekit_ace.merging.checks import MergeChecks, add_unplanned, check_after, check_before
from mergekit_ace.merging.job import (
    MERGE_PACKAGES,
    MergeError,
    MergeJob,
    OutputError,
    Shard,
    build_in_order,
    numbering,
    plan_job,
    plan_shards,
)
from mergekit_ace.merging.manifest import Manifest, fingerprint, named_paths
from mergekit_ace.merging.output import (
    OutputFolder,
    append_lines,
    complete_model,
    drop_lines,
    report_sizes,
)
from mergekit_ace.merging.pool import WorkerOptions, WorkerPool, make_pool
from mergekit_ace.merging.preparation import needed_files, prepare_adapters
from mergekit_ace.merging.progress import MergeProgress
from mergekit_ace.merging.worker import ShardDone, ShardFailed, TensorMerged
from mergekit_ace.planning import (
    PlannedMerge,
    check_inputs,
    find_models,
    model_folders,
    read_merge_config,
)
from mergekit_ace.preflight.checkpoints import own_loaders

ATTEMPTS = 3  # to compute one shard


def run_shards(
    config: Path,
    out: str,
    options: MergeOptions,
    workers: WorkerOptions | None = None,
    *,
    resume: bool = False,
    overwrite: bool = False,
    as_json: bool = False,
    checks: MergeChecks | None = None,
) -> None:
    """Merge shard by shard, as `mergekit-ace merge` does.

    Args:
        workers: who computes; this process without.
        resume: go on with an unfinished merge, if there is one.
        overwrite: drop whatever merge or model is there.

    Raises:
        MergeError: the directory holds something else, a check fails, or a shard cannot be
            computed.
        DamagedFileError: an input is damaged.
        RuntimeError, ValueError, OSError: whatever mergekit, or a merge method, says.
    """
    _check_flags(options)
    workers, quiet, checks = workers or WorkerOptions(), options.quiet, checks or MergeChecks()
    folder = OutputFolder(out)
    with folder.lock(), own_loaders():
        known = _claim(folder, resume=resume, overwrite=overwrite)
        check_before(config, options, checks)
        job, plan = _plan(config, folder, options, known, checks)
        identity = fingerprint(job, plan)
        _check_directory(folder, job, plan, known, identity)
        folder.check_needed(needed_files(config, job, plan), named_paths(plan, "report"))
        if overwrite:
            folder.drop()

        changed = known.forget_changed(folder.path) if known else []
        missing, edited = known.changed_files(folder.path) if known else ([], [])
        if known and known.complete and not changed and not missing:
            folder.remove_scratch()
            progress = MergeProgress([], kept=len(known.shards), quiet=quiet, as_json=as_json)
            check_after(folder.path, job, checks, progress)
            progress.say(f"{folder.path} is complete: all its shards are as the manifest says")
            _say_edited(progress, edited)
            progress.end(str(folder.path))
            return

        folder.clean_scratch()
        job = replace(job, tokenizer=_build_tokenizer(folder, plan, known))
        shards, memory = plan_shards(job, plan, known.groups if known else ())
        reports = report_sizes(named_paths(plan, "report"))
        manifest = known or Manifest.begin(job, identity, shards, reports)
        todo = _begin(folder, job, manifest, shards, kept=edited)
        kept = len(shards) - len(todo)

        progress = MergeProgress(todo, kept=kept, quiet=quiet, as_json=as_json)
        libraries = redirect_stdout(sys.stderr) if as_json else nullcontext()
        with closing(progress), libraries:
            progress.start(resumed=known is not None, changed=[*changed, *missing])
            _say_edited(progress, edited)
            if todo:
                logs = not (quiet or as_json)
                with closing(make_pool(workers, job, plan, memory, logs=logs)) as pool:
                    _compute(todo, pool, manifest, folder, progress, job)
            manifest.files |= complete_model(folder, job, plan, manifest, kept=edited)
            manifest.complete = True
            manifest.write(folder.path)
            folder.remove_scratch()
            check_after(folder.path, job, checks, progress)
            progress.end(str(folder.path))


def _check_flags(options: MergeOptions) -> None:
    """Refuse flags of mergekit that mean nothing here.

    Raises:
        MergeError: naming the flag and what to give instead.
    """
    if options.multi_gpu:
        raise MergeError(
            "--multi-gpu (and --gpu-rich) spread one process over all GPUs; here every worker has "
            "GPUs of its own: give --cuda --workers N"
        )
    if options.async_write or options.write_threads != 1:
        raise MergeError(
            "--async-write and --write-threads are of no use here: a shard is finished when it is "
            "on the disk. Give --workers N, and one computes while another writes"
        )


def _claim(folder: OutputFolder, *, resume: bool, overwrite: bool) -> Manifest | None:
    """Return the manifest of the merge to go on with; None where one is begun.

    Raises:
        MergeError: something is in the directory that nobody has said what to do with.
    """
    if overwrite:
        return None
    known = Manifest.read(folder.path)
    if known is None:
        folder.check_free()
    elif not resume:
        state, use = ("a complete", "check") if known.complete else ("an unfinished", "go on with")
        raise MergeError(
            f"{folder.path} holds {state} merge; give --resume to {use} it, or --overwrite to "
            "begin anew"
        )
    return known


def _plan(
    config: Path,
    folder: OutputFolder,
    options: MergeOptions,
    known: Manifest | None,
    checks: MergeChecks,
) -> tuple[MergeJob, PlannedMerge]:
    """Read the config, find and check all models, and plan; writes nothing to the directory."""
    parsed, source = read_merge_config(config)
    adapters = _load_models(parsed, options)
    models = tuple(str(model) for model in parsed.referenced_models())
    if known is not None and sorted(known.models) == sorted(models):
        models = tuple(known.models)
    job = MergeJob(
        source=source,
        options=options.model_dump(),
        models=models,
        tokenizer=None,
        scratch=str(folder.scratch),
        folder=os.getcwd(),
        threads=torch.get_num_threads(),
        versions=package_versions(*MERGE_PACKAGES),
        adapters=adapters,
    )
    plan = plan_job(job)
    job = add_unplanned(job, plan, checks)
    return job, plan_job(job) if job.unplanned else plan


def _load_models(config: MergeConfiguration, options: MergeOptions) -> tuple[ModelReference, ...]:
    """Find, download and check all models, before any worker needs them.

    Adapters that cannot be merged as such are merged into their bases; the others are returned.
    """
    cache = LoaderCache()
    cache.setup(options)
    find_models(config)
    models = config.referenced_models()
    for model in models:
        for known in (model, base_of(model)):
            cache.loaders.pop(known, None)  # of another merge in this process
    adapters = []
    for model, reason in prepare_adapters(models, options):
        if not reason:
            adapters.append(model)
        elif not options.quiet:
            click.echo(f"{model} is merged into its base first: {reason}", err=True)
    show_bases(adapters)
    for model in models:
        try:
            cache.get(model)
        except UnpicklingError as error:  # its own advice is to trust the file
            raise MergeError(
                f"a .bin file of {model} holds more than tensors, which is never executed here; "
                "download it again, or the model's safetensors files"
            ) from error
    return tuple(adapters)


def _check_directory(
    folder: OutputFolder,
    job: MergeJob,
    plan: PlannedMerge,
    known: Manifest | None,
    identity: dict[str, Any],
) -> None:
    """Refuse to write over an input, or to go on with another merge.

    Raises:
        MergeError: naming what has changed.
    """
    if folder.path.resolve() in [model.resolve() for model in model_folders(job.config())]:
        raise MergeError(f"{folder.path} holds a model to be merged; write elsewhere")
    if known is None:
        return
    changed = differences(known.identity, identity)
    if known.reports.keys() != set(named_paths(plan, "report")):
        changed.append("report")
    if changed:
        raise MergeError(
            f"{folder.path} holds a merge that cannot be resumed; changed since it was begun: "
            f"{', '.join(changed)}. Undo that, choose another directory, or --overwrite to begin "
            "anew"
        )
    known.check_plan(folder.path, plan, safetensors=job.merge_options.safe_serialization)


def _build_tokenizer(
    folder: OutputFolder, plan: PlannedMerge, known: Manifest | None
) -> TokenizerInfo | None:
    """Build the tokenizer of the result, the same one as in an earlier run.

    Raises:
        MergeError: it numbers its tokens otherwise than the one that finished shards were made
            with.
    """
    if plan.tokenizer_task is None:
        return None
    built = build_in_order(plan.tokenizer_task)
    begun = known is not None and any(shard.finished for shard in known.shards)
    if known is not None and begun and known.tokenizer != numbering(built):
        raise MergeError(
            f"the tokenizer of this merge numbers its tokens otherwise than when {folder.path} was "
            "begun, so the finished shards do not fit it; --overwrite begins anew"
        )
    return built


def _begin(
    folder: OutputFolder,
    job: MergeJob,
    manifest: Manifest,
    shards: Sequence[Shard],
    *,
    kept: Sequence[str],
) -> list[Shard]:
    """Let the directory hold an unfinished merge; return the shards that are to be computed.

    Files that were edited are kept.

    Raises:
        OutputError: the disk has no room for them.
    """
    manifest.tokenizer = numbering(job.tokenizer) if job.tokenizer is not None else None
    manifest.complete = False
    folder.unmark(kept)
    manifest.write(folder.path)
    planned = zip(shards, manifest.shards, strict=True)
    todo = [shard for shard, entry in planned if entry.finished is None]
    unfinished = {name for shard in todo for name in shard.tensors}
    for path, start in manifest.reports.items():
        drop_lines(path, start, unfinished)
    folder.check_room(sum(shard.bytes for shard in todo))
    return todo


def _say_edited(progress: MergeProgress, edited: Sequence[str]) -> None:
    for file in edited:
        progress.say(f"{file} was edited after the merge, and stays; delete it to renew it")


def _compute(
    todo: Sequence[Shard],
    pool: WorkerPool,
    manifest: Manifest,
    folder: OutputFolder,
    progress: MergeProgress,
    job: MergeJob,
) -> None:
    """Have all shards computed; nobody else touches the directory and the manifest."""
    queue = ShardQueue(todo, largest_first=pool.free() > 1)
    while queue:
        while pool.free() and (shard := queue.take()):
            pool.submit(shard)
        for event in pool.events():
            if isinstance(event, TensorMerged):
                progress.merged(event.name, event.seconds)
            elif isinstance(event, ShardDone):
                shard = queue.done(event.shard)
                _enter(manifest, shard, event, folder)
                progress.finished(shard)
            elif isinstance(event, ShardFailed):
                folder.remove_parts(event.shard)
                check_inputs(job.config())  # says which file it is, where one is the cause
                progress.failed(queue.failed(event), event.message)


def _enter(manifest: Manifest, shard: Shard, done: ShardDone, folder: OutputFolder) -> None:
    try:
        append_lines(done.reports)
        if done.path is not None:
            folder.move_in(Path(done.path), shard.file)
        manifest.shards[shard.index].finished = done.finished
        manifest.write(folder.path)
    except OSError as error:
        raise OutputError(f"cannot write to {folder.path}: {error}") from error
    folder.remove_parts(shard.index)


class ShardQueue:
    """Which shard is computed next, and how often one may fail.

    Args:
        largest_first: by estimated work, so that none is left alone at the end; or in their order.
    """

    def __init__(self, shards: Sequence[Shard], *, largest_first: bool):
        if largest_first:
            shards = sorted(shards, key=lambda shard: -sum(shard.work.values()))
        self._waiting = deque(shards)
        self._taken: dict[int, Shard] = {}
        self._failures: Counter[int] = Counter()

    def __bool__(self) -> bool:
        """Tell whether anything is left to do, or being done."""
        return bool(self._waiting or self._taken)

    def take(self) -> Shard | None:
        """Return the next shard, which counts as being computed; None where none waits."""
        if not self._waiting:
            return None
        shard = self._waiting.popleft()
        self._taken[shard.index] = shard
        return shard

    def done(self, index: int) -> Shard:
        return self._taken.pop(index)

    def failed(self, event: ShardFailed) -> Shard:
        """Let a shard that has failed wait again, before all others, and return it.

        Raises:
            MergeError: it need not be tried again.
        """
        shard = self._taken.pop(event.shard)
        self._failures[event.shard] += 1
        count = self._failures[event.shard]
        if event.final or count >= ATTEMPTS:
            times = "" if event.final else f" failed {count} times, the last time with"
            raise MergeError(
                f"{shard.file}{times}: {event.message}\nWhat is finished is kept: give the same "
                "command with --resume once the cause is gone. If a model or the config has to "
                "change for that, give --overwrite instead, which begins anew"
            )
        self._waiting.appendleft(shard)
        return shard
