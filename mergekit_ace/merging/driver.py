# SPDX-License-Identifier: Apache-2.0
"""The driver of a merge: claims the directory, plans, has shards computed, completes the model."""

from __future__ import annotations

import os
import sys
from collections import Counter, deque
from collections.abc import Sequence
from contextlib import closing, nullcontext, redirect_stdout
from pathlib import Path
from pickle import UnpicklingError

import click
import torch
from mergekit.common import ModelReference
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.tokenizer import TokenizerInfo

from mergekit_ace.adapters.adapter_plan import base_of
from mergekit_ace.adapters.adapter_tasks import show_bases
from mergekit_ace.files.models import Checkpoint, own_loaders
from mergekit_ace.files.saving import package_versions
from mergekit_ace.merging.checks import MergeChecks, check_after, check_before, find_extra
from mergekit_ace.merging.job import (
    MERGE_PACKAGES,
    MergeError,
    MergeJob,
    OrderedConfiguration,
    OutputError,
    Shard,
    build_in_order,
    plan_run,
    plan_shards,
    read_checkpoints,
)
from mergekit_ace.merging.manifest import Manifest, fingerprint
from mergekit_ace.merging.output import (
    OutputFolder,
    append_lines,
    complete_model,
    drop_lines,
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
    workers, quiet, checks = workers or WorkerOptions(), options.quiet, checks or MergeChecks()
    _check_flags(options, workers)
    folder = OutputFolder(out)
    with folder.lock(), own_loaders():
        known = _claim(folder, resume=resume, overwrite=overwrite)
        check_before(config, options, checks)
        plan, checkpoints = _plan(config, options, known.models if known else (), checks)
        if folder.path.resolve() in [model.resolve() for model in model_folders(plan.config)]:
            raise MergeError(f"{folder.path} holds a model to be merged; write elsewhere")
        identity = fingerprint(plan)
        if known:
            known.check(folder.path, plan, identity)
        folder.check_needed(needed_files(config, plan), plan.named_paths("report"))
        if overwrite:
            folder.drop()

        tokenizer = build_in_order(plan.tokenizer_task)
        shards, memory = plan_shards(plan, checkpoints, tokenizer)
        manifest = known or Manifest.begin(plan, identity)
        lost, edited = manifest.compare(folder.path, shards)
        todo = [shard for shard in shards if shard.file not in manifest.files]
        whole = manifest.complete and not lost and not todo and "config.json" in manifest.files
        if not whole:
            _begin(folder, manifest, todo, kept=edited)

        progress = MergeProgress(todo, kept=len(shards) - len(todo), quiet=quiet, as_json=as_json)
        libraries = redirect_stdout(sys.stderr) if as_json else nullcontext()
        with closing(progress), libraries:
            progress.start(resumed=known is not None, changed=lost)
            for file in edited:
                progress.say(f"{file} was edited after the merge, and stays; delete it to renew it")
            if todo:
                job = _job(plan, tokenizer, folder)
                logs = not (quiet or as_json)
                with closing(make_pool(workers, job, memory, logs=logs)) as pool:
                    _compute(todo, pool, manifest, folder, progress, plan)
            if not whole:
                manifest.files |= complete_model(folder, plan, tokenizer, shards, kept=edited)
                manifest.complete = True
                manifest.write(folder.path)
            folder.remove_scratch()
            check_after(folder.path, plan, checks, progress)
            progress.end(str(folder.path))


def _check_flags(options: MergeOptions, workers: WorkerOptions) -> None:
    """Raise a `MergeError` for flags of mergekit that mean nothing here, or to such workers."""
    if options.multi_gpu or options.async_write or options.write_threads != 1:
        raise MergeError(
            "--multi-gpu, --gpu-rich, --async-write and --write-threads are for one process, and "
            "here every worker has a GPU of its own, and one computes while another writes: give "
            "--workers N, with --cuda for GPUs"
        )
    numbered = (options.device or "").startswith("cuda:") and options.device != "cuda:0"
    if numbered and workers.gpus != 0 and (workers.workers > 1 or workers.ray is not None):
        raise MergeError(
            f"--device {options.device}: every worker sees one GPU, which is its first; give "
            "--cuda, and in CUDA_VISIBLE_DEVICES the GPUs that workers of this machine may take"
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
    path: Path, options: MergeOptions, order: Sequence[str], checks: MergeChecks
) -> tuple[PlannedMerge, dict[ModelReference, Checkpoint]]:
    """Read the config, find and check all models, and plan; writes nothing to the directory.

    Args:
        order: of the models in an earlier run.

    Returns:
        The plan, and the headers of all models.
    """
    _, source = read_merge_config(path)
    config = OrderedConfiguration.in_order(source, order)
    adapters = _load_models(config, options)
    plan = plan_run(config, source, options, adapters)
    checkpoints = read_checkpoints(config)
    extra = find_extra(plan, checkpoints, checks)
    if extra:
        plan = plan_run(config, source, options, adapters, extra)
    return plan, checkpoints


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


def _job(plan: PlannedMerge, tokenizer: TokenizerInfo | None, folder: OutputFolder) -> MergeJob:
    return MergeJob(
        saves=plan.saves,
        options=plan.options,
        builder=plan.tokenizer_task,
        tokenizer=tokenizer,
        scratch=str(folder.scratch),
        folder=os.getcwd(),
        threads=torch.get_num_threads(),
        versions=package_versions(*MERGE_PACKAGES),
    )


def _begin(
    folder: OutputFolder, manifest: Manifest, todo: Sequence[Shard], *, kept: Sequence[str]
) -> None:
    """Let the directory hold an unfinished merge; files that were edited are kept.

    Raises:
        OutputError: the disk has no room for what is to be computed.
    """
    folder.clean_scratch()
    manifest.complete = False
    folder.unmark(kept)
    manifest.write(folder.path)
    unfinished = {name for shard in todo for name in shard.tensors}
    for path, start in manifest.reports.items():
        drop_lines(path, start, unfinished)
    folder.check_room(sum(shard.bytes for shard in todo))


def _compute(
    todo: Sequence[Shard],
    pool: WorkerPool,
    manifest: Manifest,
    folder: OutputFolder,
    progress: MergeProgress,
    plan: PlannedMerge,
) -> None:
    """Have all shards computed; nobody else touches the directory and the manifest.

    Raises:
        MergeError: a shard cannot be computed.
    """
    shards = {shard.index: shard for shard in todo}
    if pool.free() > 1:  # the largest first, so that none is left alone at the end
        todo = sorted(todo, key=lambda shard: -sum(shard.work.values()))
    waiting, done, failures = deque(todo), 0, Counter[int]()
    while done < len(shards):
        while waiting and pool.free():
            pool.submit(waiting.popleft())
        for event in pool.events():
            shard = shards[event.shard]
            if isinstance(event, TensorMerged):
                progress.merged(event.name, event.seconds)
            elif isinstance(event, ShardDone):
                _enter(manifest, shard, event, folder)
                progress.finished(shard)
                done += 1
            else:
                folder.remove_parts(shard.index)
                check_inputs(plan.config)  # says which file it is, where one is the cause
                failures[shard.index] += 1
                _give_up(shard, event, failures[shard.index])
                progress.failed(shard, event.message)
                waiting.appendleft(shard)


def _give_up(shard: Shard, event: ShardFailed, count: int) -> None:
    """Raise a `MergeError` if a shard that has failed so many times need not be tried again."""
    if event.final or count >= ATTEMPTS:
        times = "" if event.final else f" failed {count} times, the last time with"
        raise MergeError(
            f"{shard.file}{times}: {event.message}\nWhat is finished is kept: give the same "
            "command with --resume once the cause is gone. If a model or the config has to "
            "change for that, give --overwrite instead, which begins anew"
        )


def _enter(manifest: Manifest, shard: Shard, done: ShardDone, folder: OutputFolder) -> None:
    try:
        append_lines(done.reports)
        if done.path is not None:
            folder.move_in(Path(done.path), shard.file)
        manifest.files[shard.file] = done.sha256
        manifest.write(folder.path)
    except OSError as error:
        raise OutputError(f"cannot write to {folder.path}: {error}") from error
    folder.remove_parts(shard.index)
