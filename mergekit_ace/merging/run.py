# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace merge`: claims the directory, plans, has shards computed, completes the model."""

from __future__ import annotations

import heapq
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path

import click
from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from mergekit.tokenizer import TokenizerInfo
from tqdm import tqdm

from mergekit_ace.check.check import estimate_merge
from mergekit_ace.files.models import Checkpoint, own_loaders
from mergekit_ace.merging.manifest import Manifest, fingerprint
from mergekit_ace.merging.output import OutputFolder, append_lines, complete_model, drop_lines
from mergekit_ace.merging.plan import MergeChecks, needed_files, plan_run
from mergekit_ace.merging.result import check_result, check_trial
from mergekit_ace.merging.shards import (
    SLOWEST,
    MergeError,
    MergeJob,
    Shard,
    ShardResult,
    divide_into_shards,
)
from mergekit_ace.merging.workers import Compute, WorkerOptions, open_workers
from mergekit_ace.methods.base import flush_notices, notice
from mergekit_ace.planning import PlannedMerge, check_inputs, model_folders


def run_shards(
    config: Path,
    out: str,
    options: MergeOptions,
    workers: WorkerOptions | None = None,
    *,
    overwrite: bool = False,
    checks: MergeChecks | None = None,
) -> None:
    """Merge shard by shard, as `mergekit-ace merge` does.

    Args:
        workers: who computes; this process without.
        overwrite: drop whatever merge or model is there, instead of going on with the merge.

    Raises:
        MergeError: the directory holds something else, a check fails, or a shard cannot be
            computed.
        DamagedFileError: an input is damaged.
        RuntimeError, ValueError, OSError: whatever mergekit, or a merge method, says.
    """
    workers, checks, folder = workers or WorkerOptions(), checks or MergeChecks(), OutputFolder(out)
    _check_flags(options, workers)
    folder.check_own(overwrite=overwrite)
    with folder.lock(), own_loaders():
        manifest = None if overwrite else Manifest.read(folder.path)
        if checks.prompt is not None:
            check_trial(checks.prompt, config, options)
        plan, checkpoints = plan_run(config, options, checks)
        if folder.path.resolve() in [model.resolve() for model in model_folders(plan.config)]:
            raise MergeError(f"{folder.path} holds a model to be merged; write elsewhere")
        identity = fingerprint(plan)
        if manifest:
            manifest.check(folder.path, plan, identity)
        folder.check_needed(needed_files(config, plan), plan.named_paths("report"))
        merge = _Merge(folder, plan, manifest or Manifest.begin(plan, identity), checkpoints)
        if manifest:
            merge.compare()
        merge.compute(workers, overwrite=overwrite)
        check_result(folder.path, plan, checks)
        merge.summarize()


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


class _Merge:
    """A merge into a directory, with what is finished of it."""

    def __init__(
        self,
        folder: OutputFolder,
        plan: PlannedMerge,
        manifest: Manifest,
        checkpoints: Mapping[ModelReference, Checkpoint],
    ):
        self.folder, self.plan, self.manifest = folder, plan, manifest
        task = plan.tokenizer_task
        self.tokenizer: TokenizerInfo | None = task.execute() if task else None
        self.shards = divide_into_shards(plan, checkpoints, self.tokenizer)
        self.memory = estimate_merge(plan, checkpoints).memory
        self.edited: list[str] = []  # files beside the shards, which stay
        self.slowest: dict[str, float] = {}
        self.kept = 0
        self.start = time.monotonic()

    @property
    def todo(self) -> list[Shard]:
        """The shards that are not finished."""
        return [shard for shard in self.shards if shard.file not in self.manifest.files]

    def say(self, text: str) -> None:
        """Print a line, unless mergekit's flags say `--quiet`."""
        if not self.plan.options.quiet:
            click.echo(text)

    def compare(self) -> None:
        """Compare the directory with the manifest of an earlier run; what is damaged is redone."""
        lost, self.edited = self.manifest.compare(self.folder.path, self.shards)
        for file in lost:
            self.manifest.complete = False
            self.say(f"{file} is not what it was when it was finished: it is made again")
        for file in self.edited:
            self.say(f"{file} was edited after the merge, and stays; delete it to renew it")
        settings = self.plan.config.tokenizer
        source = settings.source if settings else self.plan.config.tokenizer_source
        # mergekit numbers the new tokens of a joint tokenizer in another order in every run
        if source == "union" and not self._whole():
            self.manifest.files.clear()
            self.edited.clear()
            self.say("a merge with a joint tokenizer (`source: union`) begins anew")
        self.kept = len(self.shards) - len(self.todo)
        self.say(f"{self.kept} of {len(self.shards)} shards are finished and kept")

    def _whole(self) -> bool:
        """Tell whether nothing is left to do."""
        return self.manifest.complete and not self.todo and "config.json" in self.manifest.files

    def compute(self, workers: WorkerOptions, *, overwrite: bool) -> None:
        """Have the shards computed that are not finished, and complete the model.

        Nothing is written, or dropped, before the workers are there.

        Raises:
            MergeError: a shard cannot be computed.
        """
        if self._whole():
            self.folder.remove_scratch()
            return
        options, todo = self.plan.options, self.todo
        scratch = str(self.folder.scratch)
        job = MergeJob(options, self.plan.tokenizer_task, self.tokenizer, scratch)
        sizes = {name: size for s in todo for name, size in zip(s.tensors, s.sizes, strict=True)}
        workers = workers if todo else WorkerOptions()
        quiet = options.quiet or not todo
        with (
            tqdm(
                desc="merging", total=sum(sizes.values()), unit="B", unit_scale=True,
                disable=quiet, leave=False,
            ) as bar,
            open_workers(workers, job, self.memory, lambda n: bar.update(sizes[n])) as compute,
        ):  # fmt: skip
            self._begin(todo, overwrite=overwrite)
            self._collect(compute, todo, bar)
        LoaderCache().flush_all()
        flush_notices()
        self.manifest.files |= complete_model(
            self.folder, self.plan, self.tokenizer, self.shards, kept=self.edited
        )
        self.manifest.complete = True
        self.manifest.write(self.folder.path)
        self.folder.remove_scratch()

    def _begin(self, todo: Sequence[Shard], *, overwrite: bool) -> None:
        """Let the directory hold an unfinished merge; files that were edited are kept.

        Raises:
            MergeError: the disk has no room for what is to be computed.
        """
        if overwrite:
            self.folder.drop()
        self.folder.clean_scratch()
        self.manifest.complete = False
        self.folder.unmark(self.edited)
        self.manifest.write(self.folder.path)
        unfinished = {name for shard in todo for name in shard.tensors}
        for path, start in self.manifest.reports.items():
            drop_lines(path, start, unfinished)
        self.folder.check_room(sum(shard.bytes for shard in todo))

    def _collect(self, compute: Compute, todo: Sequence[Shard], bar: tqdm) -> None:
        """Have shards computed; nobody else touches the directory and the manifest."""
        done = 0
        with closing(compute(todo)) as results:
            for shard, result in results:
                if result.error:
                    self.folder.remove_parts(shard)
                    check_inputs(self.plan.config)  # names the file, where one is the cause
                    raise MergeError(
                        f"{shard.file}: {result.error}\nWhat is finished is kept: give the same "
                        "command again once the cause is gone. If a model or the config has to "
                        "change for that, give --overwrite instead, which begins anew"
                    )
                self._enter(shard, result)
                done += shard.bytes
                bar.update(done - bar.n)

    def _enter(self, shard: Shard, result: ShardResult) -> None:
        """Give a shard its name, and enter it in the manifest."""
        try:
            append_lines(result.reports)
            if result.path:
                self.folder.move_in(Path(result.path), shard.file)
            self.manifest.files[shard.file] = result.sha256
            self.manifest.write(self.folder.path)
        except OSError as error:
            raise MergeError(f"cannot write to {self.folder.path}: {error}") from error
        self.slowest |= result.slowest
        self.folder.remove_parts(shard)
        for text, count in result.notices.items():
            notice(text, count)

    def summarize(self) -> None:
        """Say what was done, and how long it took."""
        computed = len(self.shards) - self.kept
        if not computed:
            self.say(f"{self.folder.path} is complete: all its shards are as the manifest says")
            return
        duration = tqdm.format_interval(round(time.monotonic() - self.start))
        plural = "s" * (computed > 1)
        self.say(f"{computed} shard{plural} in {duration}; {self.folder.path} is complete")
        self.say("Slowest tensors:")
        for name, seconds in heapq.nlargest(SLOWEST, self.slowest.items(), key=lambda i: i[1]):
            self.say(f"  {seconds:8.2f} s  {name}")
