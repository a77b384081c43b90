# SPDX-License-Identifier: Apache-2.0
"""Settings of a `score.yml`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field, model_validator

from mergekit_ace.naming import short_names
from mergekit_ace.training.config import Count, DataConfig, Strict, Task


class ScoredExpert(Strict):
    """Expert of the merges, and what it is for.

    Attributes:
        model: folder or Hub name, `@revision`, `BASE+ADAPTER`, or an adapter.
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
        merges: folders, adapters or Hub names; a `.yml` is a merge config, which is merged first.
        keep: texts of what nobody may lose; without it, the base writes some.
        dtype: of all models; `auto` is that of their files.
        task_folder: tasks of one's own for lm-evaluation-harness.
    """

    base_model: str
    models: Annotated[tuple[ScoredExpert, ...], Field(min_length=1)]
    merges: Annotated[tuple[str, ...], Field(min_length=1)]
    keep: DataConfig | None = None
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    task_folder: str | None = None
    trust_remote_code: bool = False
    task: ClassVar[Task] = "causal-lm"

    @model_validator(mode="after")
    def _check(self) -> ScoreConfig:
        for data in (*(expert.data for expert in self.models), self.keep):
            if data is None:
                continue
            if data.image is not None:
                raise ValueError(f"data {data.path} needs a column text, prompt or messages")
            if data.prompt is not None and data.completion is None:
                raise ValueError(f"data {data.path} needs a `completion` of each prompt")
        for what, given in (
            ("models", [expert.model for expert in self.models]),
            ("merges", self.merges),
        ):
            twice = next((one for one in given if list(given).count(one) > 1), None)
            if twice is not None:
                raise ValueError(f"`{what}` has {twice} twice")
        tasks = [task for expert in self.models for task in expert.tasks]
        if len({*tasks}) < len(tasks):
            raise ValueError("`tasks` has a task twice; every model does each of them")
        names = short_names([expert.model for expert in self.models])
        if taken := {"base", "keep"} & {*names}:
            raise ValueError(f"an expert is called {min(taken)}, as other figures are; rename it")
        stems = [Path(one).stem for one in self.merges if one.endswith((".yml", ".yaml"))]
        if len({*stems}) < len(stems):
            raise ValueError("two merge configs have one file name; rename one of them")
        return self
