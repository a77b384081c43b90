# SPDX-License-Identifier: Apache-2.0
"""What is asked of a merge before it starts, and of its result."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass
from pathlib import Path

from mergekit.common import ModelReference
from mergekit.io.tasks import LoaderCache
from mergekit.options import MergeOptions

from mergekit_ace.check.check import check_merge
from mergekit_ace.check.config import Finding, shown_errors
from mergekit_ace.check.loading import (
    NotLoadedError,
    Treatment,
    treat_unplanned,
    verify_model,
)
from mergekit_ace.files.model_files import config_donor
from mergekit_ace.files.models import Checkpoint
from mergekit_ace.merging.job import MergeError
from mergekit_ace.merging.progress import MergeProgress
from mergekit_ace.merging.trial import check_trial, try_prompt
from mergekit_ace.planning import PlannedMerge, UnplannedTensor, read_merge_config


@dataclass(frozen=True)
class MergeChecks:
    """What `mergekit-ace merge` checks.

    Attributes:
        strict: check the config and the models first, and stop at errors; a result that is no whole
            model is an error as well, and else a warning.
        unplanned: what to do with tensors that mergekit's architecture does not plan.
        prompt: a text that the result is to continue; None for no trial.
    """

    strict: bool = True
    unplanned: Treatment = "error"
    prompt: str | None = None


def check_before(config: Path, options: MergeOptions, checks: MergeChecks) -> None:
    """Run `check`, and show what it warns of, unless mergekit's flags say `--quiet`.

    Raises:
        MergeError: something is wrong; the message names all of it, with the remedies.
    """
    if checks.prompt is not None:
        check_trial(checks.prompt, config_donor(read_merge_config(config)[0]), options)
    if not checks.strict:
        return
    findings = check_merge(config, options, unplanned=checks.unplanned).findings
    _check(findings, "Nothing was merged; --no-check leaves this check out", quiet=options.quiet)


def find_extra(
    plan: PlannedMerge, checkpoints: Mapping[ModelReference, Checkpoint], checks: MergeChecks
) -> list[UnplannedTensor]:
    """Return the tensors of a merge that mergekit leaves out of its plan.

    Raises:
        MergeError: there are some, and nobody has said what to do with them.
    """
    extra, findings = treat_unplanned(plan, checkpoints, checks.unplanned)
    quiet = checks.strict or plan.options.quiet
    _check(findings, "Nothing was merged", quiet=quiet)  # said already
    return list(extra)


def check_after(
    folder: Path, plan: PlannedMerge, checks: MergeChecks, progress: MergeProgress
) -> None:
    """Check that a result is a whole model, and let it continue the prompt, where there is one.

    Raises:
        MergeError: something is wrong with it.
    """
    donor, options = config_donor(plan.config), plan.options
    try:
        weights = Path(LoaderCache().get(donor).index.base_path)
        problem = verify_model(folder, donor, weights, trust_remote_code=options.trust_remote_code)
    except NotLoadedError as error:
        reason = str(error).splitlines()[0]
        progress.say(f"whether the result loads was not checked: {reason}")
        problem = ""
    if problem:
        text = (
            f"{folder} is no model that transformers loads whole: {problem}. The files stay. See "
            "what `slices:` and `modules:` of the config leave out, and what --unplanned carries "
            "over"
        )
        if checks.strict:
            raise MergeError(text)
        progress.say(f"warning: {text}", err=True)
    if checks.prompt is None:
        return
    with redirect_stdout(sys.stderr):  # progress has the real one, for programs
        trials = try_prompt(checks.prompt, folder, donor, options)
    for trial in trials:
        progress.say(trial.text, asked_for=True)
        progress.event("try", **asdict(trial))


def _check(findings: Iterable[Finding], end: str, *, quiet: bool) -> None:
    errors = shown_errors(findings, quiet=quiet)
    if errors:
        raise MergeError(f"{errors}\n{end}")
