# SPDX-License-Identifier: Apache-2.0
"""Settings of a `calibrate.yml`; unknown keys and wrong types are errors."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from mergekit_ace.training.config import DataConfig, ExpertConfig, Strict


class CalibrateConfig(Strict):
    """Settings of a `calibrate.yml`.

    Attributes:
        merged_model: the merge to start from: a folder or a name on the Hub.
        base_model: what the experts were fine-tuned from. With it, λ of the merge is chosen first;
            without, the merge is taken as it is.
        models: the experts that were merged, each with texts of what it is for; `samples` rows of
            them are read, 64 by default, without any label.
        keep: texts of any kind on which the merge should stay as it is.
        task: what the models do; only language models of Llama's kind can be calibrated.
        trust_remote_code: as in transformers.
    """

    merged_model: str
    base_model: str | None = None
    models: Annotated[tuple[ExpertConfig, ...], Field(min_length=1)]
    keep: DataConfig
    task: Literal["causal-lm"] = "causal-lm"
    trust_remote_code: bool = False

    @model_validator(mode="before")
    @classmethod
    def _ask_for_keep(cls, given: Any) -> Any:
        if isinstance(given, dict) and "keep" not in given:
            raise ValueError(
                "keep is missing: add texts on which the merge should stay as it is, such as "
                "keep: {path: other.jsonl, text: text}"
            )
        return given

    @model_validator(mode="after")
    def _check(self) -> CalibrateConfig:
        for name, data in self.sources:
            if data.image is not None:
                raise ValueError(f"the data of {name} needs a column text, prompt or messages")
        return self

    @property
    def sources(self) -> tuple[tuple[str, DataConfig], ...]:
        """All data by the name of its teacher; last what should stay."""
        return (*((expert.task, expert.data) for expert in self.models), ("keep", self.keep))
