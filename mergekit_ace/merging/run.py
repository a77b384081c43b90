# SPDX-License-Identifier: Apache-2.0
"""The driver of a merge: claims the directory, has its shards computed, completes it."""

from __future__ import annotations

import os
import pickle
import sys
from collections.abc import Sequence
from contextlib import closing, nullcontext, redirect_stdout
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mergekit.config import MergeConfiguration
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions

from mergekit_ace.files import differences, flush_to_disk, sha256
from mergekit_ace.merging.crew import ALONE, Crew, make_workers
from mergekit_ace.merging.errors import MergeError, OutputError
from mergekit_ace.merging.events import ShardDone, ShardFailed, TensorMerged, WrittenShard
from mergekit_ace.merging.finish import finish_model
from mergekit_ace.merging.folder import TOKENIZER, OutputFolder
from mergekit_ace.merging.job import MergeJob, MergePlan, plan_job
from mergekit_ace.merging.made_of import merge_identity, named_paths
from mergekit_ace.merging.manifest import Entry, Finished, Manifest, planned_entries
from mergekit_ace.merging.progress import Progress
from mergekit_ace.merging.queue import ShardQueue
from mergekit_ace.merging.reports import append_lines, drop_lines, report_sizes
from mergekit_ace.merging.shards import Shard, plan_shards
from mergekit_ace.merging.sizes import estimate, output_sizes, read_all, work_by_tensor
from mergekit_ace.merging.verify import forget_changed
from mergekit_ace.merging.workers import Workers
from mergekit_ace.planning import check_inputs, model_folders, read_merge_config


def run_shards(
    config: Path,
    out: str,
    options: MergeOptions,
    crew: Crew = ALONE,
    *,
    resume: bool = False,
    overwrite: bool = False,
    as_json: bool = False,
) -> None:
    """`mergekit-ace merge`.

    Args:
        config: of mergekit.
        out: the directory of the result.
        options: mergekit's flags.
        crew: who computes.
        resume: go on with an unfinished merge, if there is one.
        overwrite: drop whatever merge or model is there.
        as_json: tell the progress to programs.

    Raises:
        MergeError: the directory holds something else, or a shard cannot be computed.
        DamagedFileError: an input is damaged.
        RuntimeError, ValueError, OSError: whatever mergekit, or a merge method, says.
    """
    check_flags(options, crew)
    folder = OutputFolder(out)
    with folder.lock():
        known = None if overwrite else Manifest.read(folder.path)
        if known is not None and not resume:
            state = "a complete" if known.complete else "an unfinished"
            raise MergeError(
                f"{folder.path} holds {state} merge; give --resume to go on with it, or "
                "--overwrite to begin anew"
            )
        if known is None and not overwrite:
            folder.check_free()
        merge = _Merge.begin(config, folder, options, known)
        merge.check_apart()
        if known is not None:
            merge.check_same(known)
        elif overwrite:
            folder.drop()
        merge.run(known, crew, name=os.path.basename(out), as_json=as_json)


def check_flags(options: MergeOptions, crew: Crew) -> None:
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


@dataclass(frozen=True)
class _Merge:
    """A merge that is known, but not yet begun or resumed."""

    folder: OutputFolder
    job: MergeJob
    plan: MergePlan
    identity: dict
    quiet: bool

    @classmethod
    def begin(
        cls, config: Path, folder: OutputFolder, options: MergeOptions, known: Manifest | None
    ) -> _Merge:
        """Read and plan; nothing is written."""
        parsed, source = read_merge_config(config)
        _warm_up(parsed, options)
        models = tuple(str(model) for model in parsed.referenced_models())
        if known is not None and set(known.models) == set(models):
            models = tuple(known.models)
        job = MergeJob(
            source=source,
            options=options.model_dump(),
            models=models,
            tokenizer=None,
            scratch=str(folder.scratch),
            folder=os.getcwd(),
            threads=torch.get_num_threads(),
        )
        plan = plan_job(job)
        return cls(folder, job, plan, merge_identity(job, plan), options.quiet)

    def check_apart(self) -> None:
        """Raise a `MergeError` if the directory is that of an input, which would be overwritten."""
        inputs = [folder.resolve() for folder in model_folders(self.job.config())]
        if self.folder.path.resolve() in inputs:
            raise MergeError(f"{self.folder.path} holds a model to be merged; write elsewhere")

    def check_same(self, known: Manifest) -> None:
        """Raise a `MergeError` if another merge is in the directory."""
        changed = differences(known.identity, self.identity)
        if changed:
            raise MergeError(
                f"{self.folder.path} holds a merge that cannot be resumed; changed since it was "
                f"begun: {', '.join(changed)}. Undo that, choose another directory, or --overwrite "
                "to begin anew"
            )

    def run(self, known: Manifest | None, crew: Crew, *, name: str, as_json: bool) -> None:
        """Compute what is not finished, and complete the directory."""
        checked = forget_changed(self.folder, known)
        if known is not None and known.complete and not checked and self.folder.is_model():
            _tell_complete(self.folder, known, self.quiet, as_json)
            self.folder.done()
            return
        self.folder.clean()
        job = replace(self.job, tokenizer=self._tokenizer(known))
        shards, sizes, memory = _plan_shards(job, self.plan, known)
        manifest = known or self._new_manifest(job, shards)
        manifest.complete = False
        self.folder.unmark()
        manifest.write(self.folder.path)
        todo = [shards[n] for n, entry in enumerate(manifest.shards) if entry.finished is None]
        kept = len(shards) - len(todo)
        unfinished = {name for shard in todo for name in shard.tensors}
        for path, start in manifest.reports.items():
            drop_lines(path, start, unfinished)
        self.folder.check_room(sum(shard.bytes for shard in todo))
        progress = Progress(todo, sizes, kept=kept, quiet=self.quiet, as_json=as_json)
        _tell_start(progress, known, checked, kept, len(shards))
        others = redirect_stdout(sys.stderr) if as_json else nullcontext()
        try:
            if todo:
                logs = not (self.quiet or as_json)
                crowd = make_workers(crew, job, self.plan, memory, logs=logs)
                with others, closing(crowd) as workers:
                    queue = ShardQueue(todo, largest_first=crew.workers > 1 or bool(crew.ray))
                    _compute(queue, workers, manifest, self.folder, progress, job.config())
            finish_model(self.folder, name, job, self.plan, manifest)
            manifest.complete = True
            manifest.write(self.folder.path)
            self.folder.done()
            progress.end(str(self.folder.path), kept)
        finally:
            progress.close()
            LoaderCache().flush_all()

    def _tokenizer(self, known: Manifest | None) -> bytes | None:
        """The tokenizer of the result as bytes: built once, and kept until all is complete."""
        if self.plan.tokenizer_task is None:
            return None
        path = self.folder.scratch / TOKENIZER
        if known is not None and path.exists() and sha256(path) == known.tokenizer:
            return path.read_bytes()
        if known is not None and any(entry.finished for entry in known.shards):
            raise MergeError(
                f"{path}, the tokenizer of this merge, is missing or damaged, and another may "
                "number its tokens differently; --overwrite begins anew"
            )
        path.write_bytes(pickle.dumps(self.plan.tokenizer_task.execute()))
        flush_to_disk(path)
        if known is not None:
            known.tokenizer = sha256(path)
        return path.read_bytes()

    def _new_manifest(self, job: MergeJob, shards: Sequence[Shard]) -> Manifest:
        tokenizer = self.folder.scratch / TOKENIZER
        return Manifest(
            identity=self.identity,
            models=list(job.models),
            tokenizer=sha256(tokenizer) if job.tokenizer is not None else None,
            reports=report_sizes(named_paths(self.plan, ["report"])),
            shards=planned_entries(list(shards)),
        )


def _warm_up(config: MergeConfiguration, options: MergeOptions) -> None:
    """Find, download and check all models, and merge adapters, before any worker needs them."""
    cache = LoaderCache()
    cache.setup(options)
    check_inputs(config)
    for model in config.referenced_models():
        cache.loaders.pop(model, None)  # of another merge in this process
        cache.get(model)


def _plan_shards(
    job: MergeJob, plan: MergePlan, known: Manifest | None
) -> tuple[list[Shard], dict[str, int], int]:
    """Shards, bytes by tensor, and bytes of memory that a worker takes."""
    options, checkpoints = job.merge_options, read_all(job)
    sizes = output_sizes(plan, job, checkpoints)
    whole = estimate(plan, job, checkpoints)
    work = work_by_tensor(sizes, whole)
    if known is None:
        shards = plan_shards(
            sizes, work, options.out_shard_size, safetensors=options.safe_serialization
        )
    else:
        shards = [_as_planned(n, entry, work) for n, entry in enumerate(known.shards)]
    return shards, sizes, whole.memory


def _as_planned(index: int, entry: Entry, work: dict[str, float]) -> Shard:
    seconds = tuple(work[name] for name in entry.tensors)
    return Shard(index, entry.file, tuple(entry.tensors), entry.bytes, seconds)


def _tell_complete(folder: OutputFolder, known: Manifest, quiet: bool, as_json: bool) -> None:
    kept = len(known.shards)
    progress = Progress([], {}, kept=kept, quiet=quiet, as_json=as_json)
    progress.say(f"{folder.path} is complete: all {kept} shards are as the manifest says")
    progress.end(str(folder.path), kept)


def _tell_start(
    progress: Progress, known: Manifest | None, changed: Sequence[str], kept: int, of: int
) -> None:
    for file in changed:
        progress.say(f"{file} is not what it was when it was finished: it is computed again")
    if known is not None:
        progress.say(f"{kept} of {of} shards are finished and kept")
    progress.event("start", kept=kept, shards=of, changed=list(changed))


def _compute(
    queue: ShardQueue,
    workers: Workers,
    manifest: Manifest,
    folder: OutputFolder,
    progress: Progress,
    config: MergeConfiguration,
) -> None:
    """Have all shards computed; the only one to touch the directory and the manifest."""
    while queue:
        while queue.waiting() and workers.free():
            workers.give(queue.take())
        for event in workers.events():
            if isinstance(event, TensorMerged):
                progress.tensor(event.name, event.seconds)
            elif isinstance(event, ShardDone):
                shard = queue.done(event.shard)
                _enter(manifest, shard, event.written, folder)
                progress.finished(shard)
            elif isinstance(event, ShardFailed):
                folder.remove_parts(event.shard)
                check_inputs(config)  # says which file it is, where one is the cause
                progress.failed(queue.failed(event), event.message)


def _enter(manifest: Manifest, shard: Shard, written: WrittenShard, folder: OutputFolder) -> None:
    """Give a shard its name, and enter it in the manifest."""
    try:
        append_lines(written.reports)
        if written.path is not None:
            folder.move_in(Path(written.path), shard.file)
        finished = Finished(written.size, written.sha256, written.tensors)
        manifest.shards[shard.index].finished = finished
        manifest.write(folder.path)
        folder.remove(Path(written.folder))
    except OSError as error:
        raise OutputError(f"cannot write to {folder.path}: {error}") from error
