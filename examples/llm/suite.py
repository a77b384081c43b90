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
    """A model on the Hub or in a local folder."""

    model: str  # the repository's name, or the folder
    subfolder: str = ""  # where the checkpoint lies in it
    gigabytes: float  # how much there is to download


class Task(Strict):
    """What every task has."""

    expert: str  # name of the expert that was trained for it
    samples: int | None = None  # how many there are, where that is known before the download


class HarnessTask(Task):
    """A task of lm-evaluation-harness, found there by its key in the suite."""

    metric: str  # the harness's name of it and of its filter, such as `acc,none`
    runs_code: bool = False  # whether the answers are programs, which the metric runs


class GlueTask(Task):
    """Sentences, or pairs of them, that an expert's own head classifies or scores."""

    data: dict[str, Any]  # the arguments of `datasets.load_dataset`
    columns: Annotated[list[str], Field(min_length=1, max_length=2)]  # with text
    # The last two are means: of accuracy and F1, and of Pearson's and Spearman's correlations.
    metric: Literal["accuracy", "matthews", "accuracy_f1", "correlations"] = "accuracy"
    first: int | None = None  # how many samples count, where a paper took no more


class ClipTask(Task):
    """Images that are classified by the nearest of the prompts of their classes."""

    data: dict[str, Any]  # the arguments of `load_dataset`; the columns are `image` and `label`
    templates: Annotated[list[str], Field(min_length=1)]  # the prompts, with {} for the class
    classes: list[str] | None = None  # their names, if not those of the column `label`


class Row(Strict):
    """A merge whose parameters are not the defaults, and why."""

    merge_method: str
    parameters: dict[str, Any] = {}
    why: str


class Published(Strict):
    """A row that somebody published, in percent."""

    row: str
    source: str  # paper and table, or repository and file
    scores: dict[str, float] = {}  # by task
    mean: float | None = None  # as published; else it is formed from the scores
    share: float | None = None  # mean share of the experts' scores, where only that is known


class BaseSuite(Strict):
    """What every suite has."""

    base: Checkpoint
    experts: dict[str, Checkpoint]
    dtype: str = "float32"  # in which mergekit merges
    out_dtype: str | None = None  # of the merged checkpoints, if another
    rows: dict[str, Row] = {}  # merges beside those of our methods at their defaults
    published: list[Published] = []  # the shares refer to the row `experts` among them

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
    """Language models, evaluated by lm-evaluation-harness; whole checkpoints are merged."""

    evaluator: Literal["harness"]
    tasks: dict[str, HarnessTask]
    chat_template: bool = False  # whether questions are asked in the model's chat format
    include_path: str | None = None  # a folder with further tasks, instead of the harness's own


class GlueSuite(BaseSuite):
    """Text classifiers: the encoders are merged, and every expert's head stays its own."""

    evaluator: Literal["glue"]
    tasks: dict[str, GlueTask]
    encoder: str  # the class of transformers as which the encoders are merged
    max_length: int  # in tokens; the rest of a text is cut off


class ClipSuite(BaseSuite):
    """CLIP: the vision towers are merged, and the base's text tower names the classes."""

    evaluator: Literal["clip"]
    tasks: dict[str, ClipTask]
    encoder: str = "CLIPVisionModel"


Suite: TypeAlias = HarnessSuite | GlueSuite | ClipSuite
_ANY_SUITE = TypeAdapter(Annotated[Suite, Field(discriminator="evaluator")])


def load_suite(name: str) -> Suite:
    """Read the suite of this name, or the file; a ValueError says what is wrong with it."""
    own = SUITES / f"{name}.yml"
    path = own if own.is_file() else Path(name)
    if not path.is_file():
        known = ", ".join(sorted(path.stem for path in SUITES.glob("*.yml")))
        raise ValueError(f"there is no such suite: give one of {known}, or a file")
    return _ANY_SUITE.validate_python(yaml.safe_load(path.read_text(encoding="utf-8")))
