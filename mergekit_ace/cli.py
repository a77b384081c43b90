# SPDX-License-Identifier: Apache-2.0
"""The command `mergekit-ace`: load, validate, call."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from pydantic import BaseModel

import mergekit_ace
from mergekit_ace.naming import ConfigError

if TYPE_CHECKING:
    from mergekit.options import MergeOptions

M = TypeVar("M", bound=BaseModel)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(file_okay=False, path_type=Path)
HELP = {"help_option_names": ["-h", "--help"]}
# mergekit's flags that change what is read, and where it is computed.
READING_FLAGS = """
    allow_crimes transformers_cache lora_merge_cache lora_merge_dtype cuda device trust_remote_code
    lazy_unpickle read_to_gpu
""".split()
# Flags that `merge` refuses, and says what to give instead.
REFUSED_FLAGS = (
    "multi_gpu", "gpu_rich", "async_write", "write_threads", "safe_serialization"
)  # fmt: skip


class Command(click.Command):
    """A command with an example in its help, and options in the groups of `mergekit-yaml`."""

    def __init__(self, *args: Any, example: str, flags: Collection[str] | None = (), **kwargs: Any):
        """Take flags of `mergekit-yaml` beside the command's own; None for all of them."""
        epilog = f"\b\nExample:\n  mergekit-ace {example}"
        super().__init__(*args, context_settings=HELP, epilog=epilog, **kwargs)
        self._flags = flags

    def make_context(self, info_name: Any, args: list[str], *rest: Any, **more: Any) -> Any:
        if self._flags != ():
            known = mergekit_flags()
            self.params += [known[name] for name in (known if self._flags is None else self._flags)]
            self._flags = ()
        return super().make_context(info_name, args, *rest, **more)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from mergekit.options import PrettyPrintHelp

        PrettyPrintHelp.format_options(self, ctx, formatter)  # type: ignore


class Commands(click.Group):
    """All commands; errors of ours, of mergekit and of transformers are shown as one message."""

    command_class = Command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except (click.exceptions.Exit, click.Abort):
            raise
        except (ValueError, RuntimeError, OSError, ImportError) as error:
            raise click.ClickException(str(error)) from error


# What several commands share.
CONFIG = click.argument("config", type=FILE)
OUT = click.argument("out", type=FOLDER)
QUIET = click.option("--quiet", is_flag=True, help="No progress bars.")


@lru_cache(maxsize=1)
def mergekit_flags() -> dict[str, click.Option]:
    """Return the options of `mergekit-yaml` by name."""
    from mergekit.common import parse_kmb
    from mergekit.options import add_merge_options

    command = click.command()(add_merge_options(lambda merge_options: merge_options))
    options = {str(one.name): one for one in command.params if isinstance(one, click.Option)}
    size = options["out_shard_size"]
    size.type, size.metavar = click.types.convert_type(parse_kmb), "SIZE"  # names a wrong option
    size.help = "Largest size of a file of weights, in bytes; 5B, 5 GB, by default."
    options["lora_merge_dtype"].type = click.Choice(["bfloat16", "float16", "float32", "float64"])
    for name in REFUSED_FLAGS:
        options[name].hidden = True
    return options


def take_options(values: dict[str, Any], *, here: bool = True, **others: Any) -> MergeOptions:
    """Take mergekit's options out of a command line; raise if `here` is not the device for it."""
    from mergekit.options import MergeOptions

    from mergekit_ace.methods.base import check_device

    names = values.keys() & MergeOptions.model_fields.keys()
    options = MergeOptions(**{name: values.pop(name) for name in names}, **others)
    if here:
        check_device(options.device or "cpu")
    return options


def use_device(ctx: click.Context, option: click.Parameter, value: str | None) -> None:
    """Let torch see only the device that a command line asks for, before it is imported."""
    if value is None:
        return
    kind, _, number = value.partition(":")
    if kind == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    elif kind == "cuda" and number.isdecimal():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        cards = {int(number): number} if visible is None else dict(enumerate(visible.split(",")))
        os.environ["CUDA_VISIBLE_DEVICES"] = cards.get(int(number), "")
    from mergekit_ace.methods.base import check_device

    check_device(kind)


def run_options(out: Any = OUT) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that adds what every command takes that runs models."""
    seen: dict[str, Any] = {"callback": use_device, "expose_value": False}
    text = "Compute on this device; without, on a GPU where there is one."
    trust = "Run code that models bring along (danger)."
    added = (
        CONFIG,
        out,
        click.option("--overwrite", is_flag=True, help="Drop what another run has left in OUT."),
        QUIET,
        click.option("--device", help=text, **seen),
        click.option("--cuda", flag_value="cuda", help="The same as --device cuda.", **seen),
        click.option("--trust-remote-code", is_flag=True, help=trust),
    )

    def add(command: Callable[..., None]) -> Callable[..., None]:
        for option in reversed(added):
            command = option(command)
        return command

    return add


@click.group(
    cls=Commands,
    context_settings=HELP,
    epilog="\b\nExample:\n  mergekit-ace check ace.yml && mergekit-ace merge ace.yml out/",
)
@click.version_option(mergekit_ace.__version__, package_name="mergekit-ace")
def main() -> None:
    """Check, run, explain and improve merges; `mergekit-yaml` knows the methods, too."""


@main.command(example="train train.yml learned/")
@run_options()
def train(config: Path, out: Path, **given: Any) -> None:
    """Learn merging coefficients from samples.

    OUT gets the coefficients, and a config that merges with them. A run that was interrupted goes
    on when the same command is given again.
    """
    from mergekit_ace.training.config import TrainConfig
    from mergekit_ace.training.train import run_training

    run_training(read_config(config, TrainConfig, given), out, **given)


@main.command(example="statistics stats.yml stats/")
@run_options()
def statistics(config: Path, out: Path, **given: Any) -> None:
    """Measure on samples what regmean and fisher read.

    CONFIG is a train config with `measure: [covariances, fisher]`, one or both; covariances
    serve ace and ace_plus, too. A run that was interrupted goes on when the same command is given
    again.
    """
    from mergekit_ace.training.statistics import StatisticsConfig, measure_statistics

    click.echo(measure_statistics(read_config(config, StatisticsConfig, given), out, **given))


@main.command(example="distill distill.yml expert/")
@run_options()
def distill(config: Path, out: Path, **given: Any) -> None:
    """Distil a teacher of another architecture into the base's.

    OUT gets an expert that can be merged. A run that was interrupted goes on when the same command
    is given again.
    """
    from mergekit_ace.training.config import DistillConfig
    from mergekit_ace.training.distill import run_distillation

    run_distillation(read_config(config, DistillConfig, given), out, **given)


@main.command("calibrate", example="calibrate calibrate.yml calibrated/")
@run_options()
def calibrate_merge(config: Path, out: Path, **given: Any) -> None:
    """Fit a merged language model to its experts on a few texts.

    OUT gets the calibrated model. No gradient is needed: every linear layer is solved for,
    with one decoder layer in memory at a time.
    """
    from mergekit_ace.calibration.calibrate import CalibrateConfig, run_calibration

    run_calibration(read_config(config, CalibrateConfig, given), out, **given)
    if not given["quiet"]:
        click.echo(f"{out} holds the calibrated merge.")


@main.command(example="score score.yml scores/")
@run_options(click.argument("out", type=FOLDER, default="scores"))
def score(config: Path, out: Path, **given: Any) -> None:
    """Measure what merges keep of their experts, and what they forget.

    Every model reads held-out texts, or texts that the experts write, and does tasks of
    lm-evaluation-harness. OUT, by default scores/, gets the figures and a page of them. A run that
    was interrupted goes on when the same command is given again.
    """
    from mergekit_ace.score.config import ScoreConfig
    from mergekit_ace.score.score import run_scoring

    click.echo(str(run_scoring(read_config(config, ScoreConfig, given), out, **given)))
    click.echo(f"\n{out / 'scores.html'}")


@main.command(example="search search.yml best/")
@run_options()
def search(config: Path, out: Path, **given: Any) -> None:
    """Search the λ and the weights of a merge that keep most.

    OUT gets the best merge as a config and as a model, an Optuna study of all trials, and a page.
    A search that was interrupted goes on when the same command is given again, and several
    processes with the same OUT share its trials.
    """
    from mergekit_ace.score.config import ScoreConfig, SearchConfig
    from mergekit_ace.score.search import run_search

    settings = read_config(config, SearchConfig, given)
    trust = {"trust_remote_code": settings.trust_remote_code}
    scored = read_config(Path(settings.score), ScoreConfig, trust)
    click.echo(run_search(settings, scored, out, **given))
    click.echo(f"\n{out / 'search.html'}")


@main.command(example="merge ace.yml out/ --workers 2", flags=None)
@CONFIG
@OUT
@click.option("--overwrite", is_flag=True, help="Drop whatever merge or model is in OUT.")
@click.option(
    "--workers", type=click.IntRange(min=1), default=1, show_default=True,
    help="Processes that compute shards, with --cuda on a GPU each; or tasks in the Ray cluster.",
)  # fmt: skip
@click.option("--ray", metavar="ADDRESS", help="Use a Ray cluster; auto: the one at hand.")
@click.option(
    "--unplanned", type=click.Choice(["base", "merge", "error"]), default="error",
    show_default=True, help="Tensors that mergekit leaves out: copy the base's, merge, or stop.",
)  # fmt: skip
@click.option("--no-check", is_flag=True, help="Merge in spite of what `check` would say.")
@click.option("--resume", is_flag=True, hidden=True, expose_value=False)  # as it does anyway
@click.option("--try", "prompt", metavar="PROMPT", help="Let base and result continue a text.")
def merge(config: Path, out: Path, no_check: bool, prompt: str | None, **given: Any) -> None:
    """Merge as `mergekit-yaml` does, but restartable, in parallel.

    A merge that was interrupted goes on when the same command is given again; what is finished is
    kept. What `mergekit-ace check` finds is said first, and errors end the merge before it starts.
    LoRA adapters (BASE+ADAPTER) are added to the base as it goes, without copies of it.
    """
    from mergekit_ace.merging.run import run_shards, try_prompt

    options = take_options(given, here=given["workers"] == 1 and given["ray"] is None)
    options.apply_global_options()
    plan = run_shards(config, out, options, strict=not no_check, **given)
    if prompt is not None:
        try_prompt(out, plan, prompt)


@main.command(
    example="adapter adapters.yml merged/",
    flags=("cuda", "device", "trust_remote_code", "quiet"),
)
@CONFIG
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--rank", type=click.IntRange(min=1), help="Highest rank of a module; says what is cut off."
)
@click.option("--overwrite", is_flag=True, help="Replace files of another result in OUT.")
def adapter(config: Path, out: Path, rank: int | None, overwrite: bool, **flags: Any) -> None:
    """Merge LoRA adapters into one, without weights of the base.

    CONFIG is that of the merge of the full models, with experts as BASE+ADAPTER.
    """
    from mergekit_ace.adapters.command import merge_adapters

    options = take_options(flags)
    options.apply_global_options()
    merge_adapters(config, out, options, rank=rank, overwrite=overwrite)


@main.command(example="check ace.yml out/", flags=READING_FLAGS)
@CONFIG
@click.argument("out", type=FOLDER, required=False)
def check(config: Path, out: Path | None, **flags: Any) -> None:
    """Check a merge before it starts.

    The exit status is 1 if something is wrong. CONFIG is that of the merge; OUT is where its result
    is to go, whose disk is looked at. Only configs, tokenizers and the headers of files are read.
    """
    from mergekit_ace.check.check import check_merge

    result = check_merge(config, take_options(flags, quiet=True), out)
    click.echo(result.text)
    if result.errors:
        raise SystemExit(1)


@main.command(
    example="inspect ace.yml inspected/",
    flags=[flag for flag in READING_FLAGS if "lora" not in flag],  # it reads adapters as they are
)
@CONFIG
@OUT
@click.option("--tensors", multiple=True, metavar="PART", help="Only names that contain it.")
@click.option("--sample", type=click.IntRange(min=1), help="At most so many, over all depths.")
@click.option("--overwrite", is_flag=True, help="Drop another inspection in OUT.")
@QUIET
def inspect(config: Path, out: Path, quiet: bool, **given: Any) -> None:
    """Measure all task vectors of a merge, without merging.

    OUT gets the report and its page, report.html. CONFIG is that of the merge.
    """
    from mergekit_ace.report.inspect import run_inspection

    run_inspection(config, out, take_options(given, quiet=True), quiet=quiet, **given)


@main.command(example="report lines.jsonl page.html")
@click.argument("lines", type=FILE)
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path), default="report.html")
def report(lines: Path, out: Path) -> None:
    """Turn the report of a merge into a page.

    LINES is the file under `report:` of the merge, or report.jsonl of `inspect`. OUT is the page,
    by default report.html.
    """
    from mergekit_ace.report.page import show_report

    show_report(lines, out)


@main.command(example="card out/ --report lines.jsonl")
@click.argument("out", type=click.Path(exists=True, path_type=Path))
@click.option(
    "--report", "lines", metavar="LINES", type=FILE,
    help="The file under `report:` of the merge, or report.jsonl of `inspect`.",
)  # fmt: skip
def card(out: Path, lines: Path | None) -> None:
    """Add the files that mergekit-yaml leaves out.

    With --report, the model card says how the merge was made. OUT is what mergekit-yaml wrote. Its
    generation config, processors and chat template are copied from the models where they are
    missing. The section of the model card is renewed if it is there already.
    """
    from mergekit_ace.report.card import update_card

    update_card(out, lines)


@main.command(example="methods ace")
@click.argument("name", required=False)
@click.option("--markdown", is_flag=True, help="As a page of documentation.")
def methods(name: str | None, markdown: bool) -> None:
    """Print every merge method with its parameters and its paper.

    NAME is that of one method, as in `merge_method:`.
    """
    from mergekit_ace.methods.reference import find_methods, method_reference

    click.echo(method_reference(find_methods(name), whole_page=markdown), nl=False)


def read_config(path: Path, kind: type[M], given: dict[str, Any]) -> M:
    """Read a YAML file as settings, with `trust_remote_code` out of the values `given`."""
    from mergekit_ace.merge_config import read_yaml, validate_config

    content, _ = read_yaml(path)
    trusted = given.pop("trust_remote_code")
    if isinstance(content, dict):
        if "trust_remote_code" in content:
            raise ConfigError(f"{path}: trust_remote_code is no setting; give --trust-remote-code")
        content |= {"trust_remote_code": True} if trusted else {}
    return validate_config(path, content, kind)


if __name__ == "__main__":
    main()
