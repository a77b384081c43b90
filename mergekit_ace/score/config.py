# SPDX-License-Identifier: Apache-2.0
"""Settings of a `score.yml` and of a `search.yml`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from mergekit_ace.algebra.task_vectors import Count, Integer, NonNegative, Positive
from mergekit_ace.naming import short_names
from mergekit_ace.training.config import DataConfig, Strict, Task


def _distinct_names(paths: tuple[str, ...]) -> tuple[str, ...]:
    stems = [Path(one).stem for one in paths if one.endswith((".yml", ".yaml"))]
    if len({*stems}) < len(stems):
        raise ValueError("two merge configs have one file name; rename one of them")
    return paths


ONE_OR_MORE = BeforeValidator(lambda value: (value,) if isinstance(value, str) else value)
NAMES = AfterValidator(_distinct_names)
Merges = Annotated[tuple[str, ...], Field(min_length=1), ONE_OR_MORE, NAMES]
Range = tuple[Positive, Positive]


class ScoredExpert(Strict):
    """Expert of the merges, and what it is for.

    Attributes:
        model: folder or Hub name, `@revision`, or `BASE+ADAPTER`.
        data: held-out texts; `test_split` of it where given. Without data and tasks the expert
            writes texts itself.
        tasks: of lm-evaluation-harness; `limit` is the number of their questions.
    """

    model: str
    data: DataConfig | None = None
    tasks: tuple[str, ...] = ()
    limit: Count | None = None

    @property
    def has_texts(self) -> bool:
        """Whether losses on texts are measured, given ones or its own."""
        return self.data is not None or not self.tasks


class ScoreConfig(Strict):
    """Settings of a `score.yml`.

    Attributes:
        merges: the same; a `.yml` is a merge config, which is merged first.
        keep: texts of what nobody may lose; without it, the base writes some.
        dtype: of all models; `auto` is that of their files.
        task_folder: tasks of one's own for lm-evaluation-harness.
    """

    base_model: str
    models: Annotated[tuple[ScoredExpert, ...], Field(min_length=1)]
    merges: Merges
    keep: DataConfig | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    task_folder: str | None = None
    trust_remote_code: bool = False
    task: ClassVar[Task] = "causal-lm"

    @property
    def tasks(self) -> tuple[str, ...]:
        """Tasks of all experts, which base and merges do."""
        return tuple(task for expert in self.models for task in expert.tasks)

    @model_validator(mode="after")
    def _check(self) -> ScoreConfig:
        for data in (*(expert.data for expert in self.models), self.keep):
            if data is not None:
                data.check_task(self.task, f"data {data.path}")
                if data.prompt is not None and data.completion is None:
                    raise ValueError(f"data {data.path} needs a `completion` of each prompt")
        experts = [expert.model for expert in self.models]
        lists = {"models": experts, "merges": self.merges, "tasks": self.tasks}
        for what, given in lists.items():
            if twice := [one for one, count in Counter(given).items() if count > 1]:
                raise ValueError(f"`{what}` has {twice[0]} twice; one of them is enough")
        for name, model in zip(short_names(experts), experts, strict=True):
            if name in ("base", "keep") or (name in self.merges and name != model):
                raise ValueError(f"an expert is called {name}, as other figures are; rename it")
        return self


class SearchSpace(Strict):
    """What is searched: ranges of λ and of factors of the experts, and parts with own λ."""

    scale: Range = Field(alias="lambda")
    weight: Range | None = None
    by: Annotated[tuple[Literal["expert", "depth", "kind"], ...], ONE_OR_MORE] = ()

    @model_validator(mode="after")
    def _check(self) -> SearchSpace:
        low, high = self.weight or (1, 1)
        if self.scale[0] > self.scale[1]:
            raise ValueError(f"`lambda: {list(self.scale)}` starts above its end")
        if not low <= 1 <= high:
            raise ValueError(f"`weight: {[low, high]}` lacks 1, the weight in a plain merge")
        if ("expert" in self.by) != (self.weight is not None):
            raise ValueError("`weight: [0.3, 3]` and `by: expert` go together; write both")
        return self


class SearchConfig(Strict):
    """Settings of a `search.yml`; `examples/configs/search.yml` explains them."""

    score: str
    merge: Merges
    search: SearchSpace
    trials: Count = 100
    aim: Literal["kept", "frontier"] | Annotated[dict[str, Positive], Field(min_length=1)] = "kept"
    budget: NonNegative = 0.05
    sequences: Count = 32
    seed: Annotated[Integer, Field(ge=0, lt=2**31)] = 0
    trust_remote_code: bool = False

    @property
    def aims(self) -> dict[str, float]:
        """Weights of what is to be large."""
        return self.aim if isinstance(self.aim, dict) else {"kept": 1.0}
