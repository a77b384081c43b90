# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace merge`: claims the directory, plans, has shards computed, completes the model."""

from __future__ import annotations

import shutil
import time
from contextlib import closing
from pathlib import Path

import click
import torch
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions
from tqdm import tqdm
from transformers import AutoTokenizer

from mergekit_ace.check.check import estimate_merge
from mergekit_ace.check.loading import merged_model, quiet_transformers, verify_model
from mergekit_ace.files.checkpoints import check_references
from mergekit_ace.files.models import config_donor, own_loaders
from mergekit_ace.files.saving import differences, locked, write_text
from mergekit_ace.merging.output import LOCK_FILE, Manifest, OutputFolder, complete_model
from mergekit_ace.merging.plan import MergeSettings, fingerprint, input_files, plan_run
from mergekit_ace.merging.shards import MergeJob, Shard, divide_into_shards
from mergekit_ace.merging.workers import Compute, find_workers
from mergekit_ace.methods.architecture import model_class
from mergekit_ace.methods.base import flush_notices, notice
from mergekit_ace.naming import ConfigError
from mergekit_ace.planning import PlannedMerge


def run_shards(
    config: Path, out: str, options: MergeOptions, settings: MergeSettings | None = None
) -> None:
    """Merge shard by shard, as `mergekit-ace merge` does; errors say what to do about them."""
    settings, folder, start = settings or MergeSettings(), OutputFolder(out), time.monotonic()
    _check_flags(options)
    folder.check_own(overwrite=settings.overwrite)
    busy = ConfigError(f"another run is writing to {folder.path}; wait for it")
    with locked(folder.path, LOCK_FILE, busy), own_loaders():
        manifest = None if settings.overwrite else Manifest.read(folder.path)
        plan, checkpoints = plan_run(config, options, settings)
        identity = fingerprint(plan)
        if manifest and (changed := differences(manifest.identity, identity)):
            raise ConfigError(
                f"{folder.path} holds a merge that cannot be resumed; changed since it was begun: "
                f"{', '.join(changed)}. Undo that, choose another directory, or --overwrite to "
                "begin anew"
            )
        folder.check_inputs(input_files(plan), plan.named_paths("report"))
        tokenizer = plan.tokenizer_task.execute() if plan.tokenizer_task else None
        shards = divide_into_shards(plan, checkpoints, tokenizer)
        edited = _find_finished(folder, plan, manifest, shards) if manifest else []
        manifest = manifest or Manifest(identity=identity)
        todo = [shard for shard in shards if shard.file not in manifest.files]
        if todo or not manifest.complete:
            memory = estimate_merge(plan, checkpoints).memory if settings.ray else 0
            job = MergeJob(options, plan.tokenizer_task, tokenizer, str(folder.scratch))
            count, address = (settings.workers, settings.ray) if todo else (1, None)
            compute = find_workers(job, count, address, memory)  # before anything is dropped
            folder.begin(overwrite=settings.overwrite, kept=edited)
            manifest.complete = False
            manifest.write(folder.path)
            _compute(folder, plan, manifest, todo, compute)
            manifest.files |= complete_model(folder, plan, tokenizer, shards, edited)
            manifest.complete = True
            manifest.write(folder.path)
        shutil.rmtree(folder.scratch, ignore_errors=True)
        _check_result(folder.path, plan, strict=settings.strict)
        if settings.prompt is not None:
            _try_prompt(folder.path, plan, settings.prompt)
        took = tqdm.format_interval(round(time.monotonic() - start))
        made = f"{len(todo)} shard{'s' * (len(todo) > 1)} in {took}; " if todo else ""
        _say(plan, f"{made}{folder.path} is complete")


def _check_flags(options: MergeOptions) -> None:
    if options.multi_gpu or options.async_write or options.write_threads != 1:
        raise ConfigError(
            "--multi-gpu, --gpu-rich, --async-write and --write-threads are for one process; give "
            "--workers N, with --cuda for a GPU each: one computes while another writes"
        )
    if not options.safe_serialization:
        raise ConfigError("a result is written in safetensors: leave out --no-safe-serialization")


def _say(plan: PlannedMerge, text: str) -> None:
    if not plan.options.quiet:
        click.echo(text)


def _find_finished(
    folder: OutputFolder, plan: PlannedMerge, manifest: Manifest, shards: list[Shard]
) -> list[str]:
    """Say what an earlier run has finished, and return what somebody has edited beside it."""
    lost, edited = manifest.compare(folder.path, shards)
    for file in lost:
        _say(plan, f"{file} is not what it was when it was finished: it is made again")
    for file in edited:
        _say(plan, f"{file} was edited after the merge, and stays; delete it to renew it")
    finished = [shard for shard in shards if shard.file in manifest.files]
    whole = len(finished) == len(shards) and "config.json" in manifest.files and not lost
    manifest.complete = manifest.complete and whole
    source = plan.config.tokenizer.source if plan.config.tokenizer else plan.config.tokenizer_source
    # mergekit numbers the new tokens of a joint tokenizer in another order in every run
    if source == "union" and not manifest.complete:
        manifest.files.clear()
        _say(plan, "a merge with a joint tokenizer (`source: union`) begins anew")
        return []
    _say(plan, f"{len(finished)} of {len(shards)} shards are finished and kept")
    return edited


def _compute(
    folder: OutputFolder,
    plan: PlannedMerge,
    manifest: Manifest,
    todo: list[Shard],
    compute: Compute,
) -> None:
    """Have shards computed, and enter them; nobody else touches the directory and the manifest."""
    needed, free = sum(shard.bytes for shard in todo), shutil.disk_usage(folder.path).free
    if 0 < free < needed:  # some network file systems tell nothing
        raise ConfigError(
            f"{folder.path} needs {needed / 1e9:.1f} GB more, and its disk has {free / 1e9:.1f} GB "
            "free; make room and give the same command again"
        )
    quiet, done = plan.options.quiet or not todo, 0
    bar = tqdm(desc="merging", total=needed, unit="B", unit_scale=True, leave=False, disable=quiet)
    with bar, closing(compute(todo, bar)) as results:
        for shard, result in results:
            if result.error:
                check_references(
                    plan.config.referenced_models()
                )  # names the file, where one is the cause
                raise ConfigError(
                    f"{shard.file}: {result.error}\nWhat is finished is kept: give the same "
                    "command again once the cause is gone. If a model or the config has to change "
                    "for that, give --overwrite instead, which begins anew"
                )
            # A kill before the entry lets lines be written twice; readers take the last of a tensor
            for path, lines in result.reports.items():
                before = Path(path).read_text("utf-8") if Path(path).exists() else ""
                write_text(path, before + Path(lines).read_text("utf-8"), durable=True)
            if result.path:
                folder.move_in(Path(result.path), shard.file)
            manifest.files[shard.file] = result.sha256
            manifest.write(folder.path)
            for left in folder.scratch.glob(f"{shard.file}-*"):
                shutil.rmtree(left, ignore_errors=True)
            for text, count in result.notices.items():
                notice(text, count)
            done += shard.bytes
            bar.update(done - bar.n)
    LoaderCache().flush_all()
    flush_notices()


def _check_result(folder: Path, plan: PlannedMerge, *, strict: bool) -> None:
    """Raise a `ConfigError`, or warn, if transformers would not load all of the result."""
    donor, trust = config_donor(plan.config), plan.options.trust_remote_code
    origin = Path(LoaderCache().get(donor).index.base_path)
    try:
        problem = verify_model(folder, donor, origin, trust_remote_code=trust)
    except ConfigError as error:
        _say(plan, f"whether the result loads was not checked: {str(error).splitlines()[0]}")
        return
    if problem:
        text = (
            f"{folder} is no model that transformers loads whole: {problem}. The files stay. See "
            "what `slices:` and `modules:` of the config leave out, and what --unplanned carries "
            "over"
        )
        if strict:
            raise ConfigError(text)
        click.echo(f"warning: {text}", err=True)


def _try_prompt(folder: Path, plan: PlannedMerge, prompt: str) -> None:
    """Let base and result continue a prompt, and print each with its loss.

    The loss is the mean per token, in nats, of the prompt and the base's continuation; where an
    encoder reads the prompt, of the continuation alone.
    """
    donor, expected = config_donor(plan.config), None
    origin = Path(LoaderCache().get(donor).index.base_path)  # of an adapter: its base
    trust, device = plan.options.trust_remote_code, plan.options.device or "cpu"
    try:
        for reference, weights in ((donor, origin), (merged_model(folder), folder)):
            source, kind = reference.model, model_class(reference.config(trust), trust)
            with quiet_transformers(), torch.inference_mode():  # one of them is in memory at a time
                tokenizer = AutoTokenizer.from_pretrained(
                    source.path, revision=source.revision, trust_remote_code=trust
                )
                model = kind.from_pretrained(weights, dtype="auto", trust_remote_code=trust)
                model = model.eval().to(device)
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
            click.echo(f"{source}: {said!r}, loss per token {loss:.5g}")
    except Exception as error:  # of many kinds, from model classes, tokenizers and the prompt
        raise ConfigError(
            f"the merge is complete, and --try failed, which needs a model that generates text and "
            f"its tokenizer: {error}"
        ) from error
