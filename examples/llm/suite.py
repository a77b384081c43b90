# SPDX-License-Identifier: Apache-2.0
"""What a suite is: the checkpoints that a paper merged, its tasks, and the figures it published."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, model_validator

SUITES = Path(__file__).resolve().parent / "suites"


class Strict(BaseModel):
    """A part of a suite file; a misspelt key is an error."""

    model_config = ConfigDict(extra="forbid")


class Checkpoint(Strict):
    """A model on the Hub or in a local folder.

    Attributes:
        model: the repository's name, or the folder.
        subfolder: where the checkpoint lies in it.
        gigabytes: how much there is to download.
    """

    model: str
    subfolder: str = ""
    gigabytes: float


class Task(Strict):
    """What every task has.

    Attributes:
        expert: name of the expert that was trained for it.
        samples: how many there are, where that is known before the download.
    """

    expert: str
    samples: int | None = None


class HarnessTask(Task):
    """A task of lm-evaluation-harness, found there by its key in the suite.

    Attributes:
        metric: the harness's name of it and of its filter, such as `acc,none`.
        runs_code: whether the answers are programs, which the metric runs.
    """

    metric: str
    runs_code: bool = False


class GlueTask(Task):
    """Sentences, or pairs of them, that an expert's own head classifies or scores.

    Attributes:
        data: the arguments of `datasets.load_dataset`.
        columns: the one or two columns with text.
        metric: accuracy, Matthews correlation, the mean of accuracy and F1, or the mean of
            Pearson's and Spearman's correlations.
        first: how many samples count, from the first on, where a paper took no more.
    """

    data: dict[str, Any]
    columns: Annotated[list[str], Field(min_length=1, max_length=2)]
    metric: Literal["accuracy", "matthews", "accuracy_f1", "correlations"] = "accuracy"
    first: int | None = None


class ClipTask(Task):
    """Images that are classified by the nearest of the prompts of their classes.

    Attributes:
        data: the arguments of `datasets.load_dataset`; the columns are `image` and `label`.
        templates: the prompts, with {} for the class.
        classes: their names, if not those of the data set's label column.
    """

    data: dict[str, Any]
    templates: Annotated[list[str], Field(min_length=1)]
    classes: list[str] | None = None


class Row(Strict):
    """A merge whose parameters are not the defaults, and why."""

    merge_method: str
    parameters: dict[str, Any] = {}
    why: str


class Published(Strict):
    """A row that somebody published, in percent.

    Attributes:
        source: paper and table, or repository and file.
        scores: by task.
        mean: as published; where it is missing, it is formed from the scores.
        share: mean share of the experts' scores, where only that is known.
    """

    row: str
    source: str
    scores: dict[str, float] = {}
    mean: float | None = None
    share: float | None = None


class BaseSuite(Strict):
    """What every suite has.

    Attributes:
        dtype: in which mergekit merges.
        out_dtype: of the merged checkpoints, if another.
        rows: merges beside those of our methods at their defaults.
        published: rows to compare with; `experts` among them is what their shares refer to.
    """

    base: Checkpoint
    experts: dict[str, Checkpoint]
    dtype: str = "float32"
    out_dtype: str | None = None
    rows: dict[str, Row] = {}
    published: list[Published] = []

    @model_validator(mode="after")
    def _names_exist(self) -> BaseSuite:
        for name, task in self.tasks.items():
            if task.expert not in self.experts:
                raise ValueError(f"task {name!r} names the expert {task.expert!r}, not in experts")
        for row in self.published:
            unknown = sorted(set(row.scores) - set(self.tasks))
            if unknown:
                raise ValueError(f"published row {row.row!r} has scores of no task: {unknown}")
        return self


class HarnessSuite(BaseSuite):
    """Language models, evaluated by lm-evaluation-harness; whole checkpoints are merged.

    Attributes:
        chat_template: whether questions are asked in the model's chat format.
        include_path: a folder with further tasks of the harness, instead of its own.
    """

    evaluator: Literal["harness"]
    tasks: dict[str, HarnessTask]
    chat_template: bool = False
    include_path: str | None = None


class GlueSuite(BaseSuite):
    """Text classifiers: the encoders are merged, and every expert's head stays its own.

    Attributes:
        encoder: the class of transformers as which the encoders are merged.
        max_length: in tokens; the rest of a text is cut off.
    """

    evaluator: Literal["glue"]
    tasks: dict[str, GlueTask]
    encoder: str
    max_length: int


class ClipSuite(BaseSuite):
    """CLIP: the vision towers are merged, and the base's text tower names the classes."""

    evaluator: Literal["clip"]
    tasks: dict[str, ClipTask]
    encoder: str = "CLIPVisionModel"


Suite: TypeAlias = HarnessSuite | GlueSuite | ClipSuite
_ANY_SUITE = TypeAdapter(Annotated[Suite, Field(discriminator="evaluator")])


def suite_file(name: str) -> Path:
    """Return the file of a suite that comes with us, or the file of that name.

    Raises:
        FileNotFoundError: there is none, with the names of those that come with us.
    """
    for path in (SUITES / f"{name}.yml", Path(name)):
        if path.is_file():
            return path
    known = ", ".join(sorted(path.stem for path in SUITES.glob("*.yml")))
    raise FileNotFoundError(f"there is no suite {name!r}: give one of {known}, or a file")


def load_suite(name: str) -> Suite:
    """Read the suite of this name, or the file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: the file has a key that no suite has, or a name that it does not define.
    """
    return _ANY_SUITE.validate_python(yaml.safe_load(suite_file(name).read_text(encoding="utf-8")))
