# SPDX-License-Identifier: Apache-2.0
"""The command `mergekit-ace`: load, validate, call."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from pydantic import BaseModel, ValidationError

import mergekit_ace

if TYPE_CHECKING:
    from mergekit.options import MergeOptions

    from mergekit_ace.check.unplanned_rules import Treatment

M = TypeVar("M", bound=BaseModel)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
# mergekit's flags that change what is read, and where it is computed.
READING_FLAGS = """
    allow_crimes transformers_cache lora_merge_cache lora_merge_dtype cuda device trust_remote_code
    lazy_unpickle read_to_gpu
""".split()
# Those for a merge in one process: `merge` refuses them, and says what to give instead.
ONE_PROCESS_FLAGS = ("multi_gpu", "gpu_rich", "async_write", "write_threads")


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Add what every command takes that reads a config and works in a folder."""
    for add in (
        click.option("--quiet", is_flag=True, help="No progress bars."),
        click.option("--overwrite", is_flag=True, help="Drop what another run has left in OUT."),
        click.argument("out", type=FOLDER),
        click.argument("config", type=FILE),
    ):
        command = add(command)
    return command


class CommandWithFlags(click.Command):
    """A command that takes flags of `mergekit-yaml` beside its own."""

    def __init__(self, *args: Any, flags: Collection[str] = (), **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._flags = flags

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        *rest, last = super().get_params(ctx)  # --help stays at the end
        known = _mergekit().params
        return [*rest, *(one for one in known if not self._flags or one.name in self._flags), last]


def take_options(values: dict[str, Any], *, here: bool = True, **others: Any) -> MergeOptions:
    """Return mergekit's options from the values of a command line, and remove them from there.

    Args:
        here: whether this process computes.

    Raises:
        ValueError: it cannot compute on the device that is asked for.
    """
    from mergekit.options import MergeOptions

    from mergekit_ace.methods.base import check_device

    names = values.keys() & MergeOptions.model_fields.keys()
    options = MergeOptions(**{name: values.pop(name) for name in names}, **others)
    if here:
        check_device(options.device)
    return options


@lru_cache(maxsize=1)
def _mergekit() -> click.Command:
    from mergekit.options import add_merge_options

    command = click.command()(add_merge_options(lambda merge_options: merge_options))
    for parameter in command.params:
        if parameter.name == "out_shard_size":
            parameter.type = ShardSize()
            parameter.help = "Bytes of a file of the result, such as 2B for 2 GB"
        if parameter.name in ONE_PROCESS_FLAGS:
            parameter.hidden = True
    return command


class ShardSize(click.ParamType):
    """Bytes of a file of the result, as mergekit writes them: `5B` for 5 GB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"0*([1-9][0-9]*)([KMB]?)", str(value), re.ASCII | re.IGNORECASE)
        if match is None:
            self.fail(
                f"{value!r} is no size; give a whole number of bytes above 0, or of thousands, "
                "millions or billions of them with K, M or B behind it, such as 5B",
                param,
                ctx,
            )
        return int(match[1]) * 1000 ** " KMB".index(match[2].upper() or " ")


@click.group()
@click.version_option(mergekit_ace.__version__, package_name="mergekit-ace")
def main() -> None:
    """Check, run, explain and improve merges; `mergekit-yaml` knows the methods, too."""


@main.command()
@run_options
def train(config: Path, out: Path, overwrite: bool, quiet: bool) -> None:
    """Learn merging coefficients from samples, as CONFIG says.

    OUT gets the coefficients, and configs that merge with them.
    A run that was interrupted goes on when the same command is given again.
    """
    from mergekit_ace.training.config import TrainConfig
    from mergekit_ace.training.run import run_training

    settings = read_config(config, TrainConfig)
    with failures():
        run_training(settings, out, overwrite=overwrite, quiet=quiet)


@main.command()
@run_options
def statistics(config: Path, out: Path, overwrite: bool, quiet: bool) -> None:
    """Measure on samples what regmean and fisher read.

    CONFIG is a train.yml, with `measure: [covariances, fisher]` for one or both; covariances serve
    ace and ace_relative, too. A run that was interrupted goes on when the same command is given
    again.
    """
    from mergekit_ace.training.measuring import StatisticsConfig, measure_statistics

    settings = read_config(config, StatisticsConfig)
    with failures():
        click.echo(measure_statistics(settings, out, overwrite=overwrite, quiet=quiet))


@main.command()
@run_options
def distill(config: Path, out: Path, overwrite: bool, quiet: bool) -> None:
    """Distil a teacher of another architecture into the base's.

    The result is an expert that can be merged.
    A run that was interrupted goes on when the same command is given again.
    """
    from mergekit_ace.training.config import DistillConfig
    from mergekit_ace.training.distill import run_distillation

    settings = read_config(config, DistillConfig)
    with failures():
        run_distillation(settings, out, overwrite=overwrite, quiet=quiet)


@main.command("calibrate")
@run_options
def calibrate_merge(config: Path, out: Path, overwrite: bool, quiet: bool) -> None:
    """Fit a merged language model to its experts on a few texts.

    OUT gets the calibrated model. No gradient is needed: every linear layer is solved for,
    with one decoder layer in memory at a time.
    """
    from mergekit_ace.calibration.calibrate_run import CalibrateConfig, run_calibration

    settings = read_config(config, CalibrateConfig)
    with failures():
        run_calibration(settings, out, overwrite=overwrite, quiet=quiet)
    if not quiet:
        click.echo(f"{out} holds the calibrated merge.")


@main.command(cls=CommandWithFlags)
@click.argument("config", type=FILE)
@click.argument("out", type=click.Path(file_okay=False))
@click.option("--resume", is_flag=True, help="Go on with an unfinished merge in OUT.")
@click.option("--overwrite", is_flag=True, help="Drop whatever merge or model is in OUT.")
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Processes that compute shards; on this machine, or in the Ray cluster.",
)
@click.option("--ray", metavar="ADDRESS", help="Use a Ray cluster; auto: the one at hand.")
@click.option(
    "--gpus-per-worker", "gpus", type=click.FloatRange(min=0), help="1 with --cuda, else 0."
)
@click.option("--json", "as_json", is_flag=True, help="Progress as JSON lines, for programs.")
@click.option(
    "--unplanned",
    type=click.Choice(["base", "merge", "error"]),
    default="error",
    show_default=True,
    help="Tensors that mergekit leaves out: copy the base's, merge them, or stop.",
)
@click.option("--no-check", is_flag=True, help="Merge in spite of what `check` would say.")
@click.option("--try", "prompt", metavar="PROMPT", help="Let base and result continue a text.")
def merge(
    config: Path, out: str, resume: bool, overwrite: bool, workers: int, ray: str | None,
    gpus: float | None, as_json: bool, unplanned: Treatment, no_check: bool, prompt: str | None,
    **flags: Any,
) -> None:  # fmt: skip
    """Merge as `mergekit-yaml` does, but restartable, in parallel.

    An unfinished merge goes on with --resume; what is finished is kept. What `mergekit-ace check`
    finds is said first, and errors end the merge before it starts. LoRA adapters (BASE+ADAPTER) are
    added to the base as it goes, without copies of it.
    """
    from mergekit_ace.merging.checks import MergeChecks
    from mergekit_ace.merging.driver import run_shards
    from mergekit_ace.merging.pool import WorkerOptions

    if resume and overwrite:
        raise click.UsageError("--resume keeps what --overwrite drops; give one of them")
    with failures():
        options = take_options(flags, here=workers == 1 and ray is None)
        options.apply_global_options()
        pool = WorkerOptions(workers, ray, gpus)
        checks = MergeChecks(strict=not no_check, unplanned=unplanned, prompt=prompt)
        run_shards(
            config, out, options, pool, resume=resume, overwrite=overwrite, as_json=as_json,
            checks=checks,
        )  # fmt: skip


@main.command(cls=CommandWithFlags, flags=("cuda", "device", "trust_remote_code", "quiet"))
@click.argument("config", type=FILE)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--rank", type=click.IntRange(min=1), help="Highest rank of a module; says what is cut off."
)
@click.option("--overwrite", is_flag=True, help="Replace files of another result in OUT.")
@click.option("--json", "as_json", is_flag=True, help="Progress as JSON lines, for programs.")
def adapter(
    config: Path, out: Path, rank: int | None, overwrite: bool, as_json: bool, **flags: Any
) -> None:
    """Merge LoRA adapters into one, without weights of the base.

    CONFIG is that of the merge of the full models, with experts as BASE+ADAPTER, or adapters alone.
    """
    from mergekit_ace.adapters.adapter_run import merge_adapters

    with failures():
        options = take_options(flags)
        options.apply_global_options()
        merge_adapters(config, out, options, rank=rank, overwrite=overwrite, as_json=as_json)


@main.command(cls=CommandWithFlags, flags=READING_FLAGS)
@click.argument("config", type=FILE)
@click.option("--out", type=FOLDER, help="Folder of the result; checks its disk.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def check(config: Path, out: Path | None, as_json: bool, **flags: Any) -> None:
    """Check a merge before it starts.

    The exit status is 1 if something is wrong. CONFIG is that of the merge. Only configs,
    tokenizers, the headers of files and a few matrices are read.
    """
    import json

    from mergekit_ace.check.check import check_merge, result_text

    with failures():
        result = check_merge(config, take_options(flags, quiet=True), out)
    click.echo(json.dumps(result.as_json(), indent=1) if as_json else result_text(result))
    if not result.ok:
        raise SystemExit(1)


@main.command(cls=CommandWithFlags, flags=READING_FLAGS)
@click.argument("config", type=FILE)
@click.argument("folder", metavar="REPORT_DIR", type=FOLDER)
@click.option("--tensors", multiple=True, metavar="PART", help="Only names that contain it.")
@click.option("--sample", type=click.IntRange(min=1), help="At most so many, over all depths.")
@click.option(
    "--covariances", metavar="STATISTICS", help="Compare the estimates with what was measured."
)
@click.option("--overwrite", is_flag=True, help="Drop another inspection in REPORT_DIR.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def inspect(config: Path, folder: Path, **options: Any) -> None:
    """Measure all task vectors of a merge, without merging.

    The result is REPORT_DIR/report.html. CONFIG is that of the merge; LoRA adapters are looked at
    without their base. An inspection that was interrupted goes on when the same command is given
    again.
    """
    from mergekit_ace.report.inspect import run_inspection

    with failures():
        quiet = options.pop("quiet")
        flags = take_options(options, quiet=True)
        run_inspection(config, folder, flags, quiet=quiet, **options)


@main.command()
@click.argument("lines", type=FILE)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), default="report.html",
    show_default=True,
)  # fmt: skip
def report(lines: Path, out: Path) -> None:
    """Turn the file under `report:` of a merge into a page."""
    from mergekit_ace.report.page import show_report

    with failures():
        show_report(lines, out)


@main.command()
@click.argument("folder", metavar="OUT_DIR", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--report",
    "lines",
    type=FILE,
    help="The file under `report:` of the merge, or report.jsonl of `inspect`.",
)
@click.option("--seed", type=int, help="What --random-seed was for mergekit-yaml.")
@click.option("--quiet", is_flag=True, help="No progress bar.")
def card(folder: Path, lines: Path | None, seed: int | None, quiet: bool) -> None:
    """Add the files that mergekit-yaml leaves out.

    With --report, the model card says how the merge was made. OUT_DIR is what mergekit-yaml wrote.
    Its generation config, processors and chat template are copied from the models where they are
    missing. The section of the model card is renewed if it is there already.
    """
    from mergekit_ace.report.card import update_card

    with failures():
        update_card(folder, lines, seed=seed, quiet=quiet)


@main.command()
@click.argument("name", required=False)
@click.option("--markdown", is_flag=True, help="As a page of documentation.")
def methods(name: str | None, markdown: bool) -> None:
    """Print every merge method with its parameters and its paper.

    NAME is that of one method, as in `merge_method:`.
    """
    from mergekit_ace.methods.reference import find_methods, reference_markdown, reference_text

    with failures():
        found = find_methods(name)
        click.echo(
            reference_markdown(found) if markdown else reference_text(found), nl=not markdown
        )


@contextmanager
def failures() -> Iterator[None]:
    """Show errors as one message, without a traceback: mergekit's own as well as ours."""
    try:
        yield
    except (ValueError, RuntimeError, OSError, ImportError) as error:
        raise click.ClickException(str(error)) from error


def read_config(path: Path, model: type[M]) -> M:
    """Read a YAML file as `model`; what is wrong in it is said by line of the config.

    Raises:
        click.ClickException: the file is no YAML, or says something that `model` does not allow.
    """
    from mergekit_ace.check.config_keys import repeated_keys
    from mergekit_ace.planning import explain_validation, read_yaml

    with failures():
        content, source = read_yaml(path)
    for finding in repeated_keys(source):
        raise click.ClickException(f"{path}: {finding.message}; {finding.remedy}")
    try:
        return model.model_validate(content)
    except ValidationError as error:
        lines = (f"    {line}" for line in explain_validation(error, content))
        raise click.ClickException("\n".join([f"{path}:", *lines])) from error


if __name__ == "__main__":
    main()
