# SPDX-License-Identifier: Apache-2.0
"""What the model card of a calibrated merge says about the calibration."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import PurePath

from mergekit_ace.calibration.layerwise import RIDGE, STEP, SampleTeacher
from mergekit_ace.calibration.scaling import ChosenScale
from mergekit_ace.files import package_versions
from mergekit_ace.report.markdown import markdown_text


def card_section(
    names: Sequence[str], teachers: Sequence[SampleTeacher], chosen: ChosenScale | None
) -> str:
    """Return the section; it names no folder of this machine.

    Args:
        names: of the experts as the config has them.
        teachers: the experts, and last the merge itself on what should stay.
        chosen: λ, if it was looked for.
    """
    shown = [*(PurePath(name).name or name for name in names), "what should stay"]
    rows = ["| texts of | sequences | tokens |", "|---|---|---|"]
    for name, teacher in zip(shown, teachers, strict=True):
        sequences = sum(len(ids) for ids, _ in teacher.batches)
        tokens = sum(int(used.sum()) for _, used in teacher.batches)
        rows.append(f"| {markdown_text(name)} | {sequences} | {tokens} |")
    way = "" if chosen is None else f"{chosen} "
    (version,) = package_versions("mergekit-ace").values()
    return "\n\n".join([
        "## Calibration",
        f"The merge was then calibrated by `mergekit-ace calibrate` (version {version}): every "
        "linear of attention and MLP was solved anew, so that it does on some texts of each expert "
        "what the expert does, and on others what it did before. All other tensors are those of "
        f"the merge. {way}The ridge was {RIDGE:g}, in mean eigenvalues of the inputs' covariance, "
        f"and the weights went {STEP:g} of the way from the merge to the solution.",
        "\n".join(rows),
    ])  # fmt: skip
