# SPDX-License-Identifier: Apache-2.0
"""Settings of a `train.yml` and of a `distill.yml`; `examples/training/README.md` explains them."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mergekit_ace.algebra.ace import AceOptions, PlusOptions
from mergekit_ace.algebra.learner import LearnerConfig
from mergekit_ace.algebra.task_vectors import Count, Fraction, Integer, NonNegative, Positive
from mergekit_ace.methods.coefficients import Basis, Granularity

Classification = Literal["sequence-classification", "image-classification"]
Task = Literal["causal-lm", "zero-shot-image-classification", Classification]
Labels = Literal["hard", "soft", "true"]
Dtype = Literal["float32", "bfloat16"]

_PURPOSES = ("text", "text_pair", "prompt", "completion", "messages", "image", "label")
# The columns that models of a task read; of other tasks `image`.
_COLUMNS = {
    "causal-lm": ("messages", "prompt", "text"),
    "sequence-classification": ("text",),
}


class Strict(BaseModel):
    """Base of all settings: unknown keys are errors, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Strict):
    """Data of one teacher, and which of its columns are used."""

    path: str
    name: str | None = None
    split: str = "train"
    validation_split: str | None = None
    test_split: str | None = None
    samples: Count | None = None
    held_out: Count = 1024
    text: str | None = None
    text_pair: str | None = None
    prompt: str | None = None
    completion: str | None = None
    messages: str | None = None
    image: str | None = None
    prompts: Annotated[tuple[str | tuple[str, ...], ...], Field(min_length=2)] | None = None
    label: str | None = None
    max_length: Count = 1024
    max_new_tokens: Count = 256

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        if len(self.columns.keys() & {"text", "prompt", "messages", "image"}) != 1:
            said = "give one of the columns text, prompt, messages and image"
            raise ValueError(f"data {self.path}: {said}")
        for inner, outer in (("completion", "prompt"), ("text_pair", "text")):
            if inner in self.columns and outer not in self.columns:
                raise ValueError(f"data {self.path}: {inner} goes with {outer}, which is missing")
        return self

    @property
    def columns(self) -> dict[str, str]:
        """Columns that are read, by purpose."""
        return {name: value for name, value in self if name in _PURPOSES and value is not None}

    def check_task(self, task: Task, whose: str) -> None:
        """Raise ValueError unless there is a column that models of `task` read."""
        wanted = _COLUMNS.get(task, ("image",))
        if not set(wanted) & self.columns.keys():
            raise ValueError(f"{whose} needs the column {' or '.join(wanted)} for task: {task}")
        if (self.prompts is not None) != (task == "zero-shot-image-classification"):
            raise ValueError(f"{whose}: `prompts` belong to task: zero-shot-image-classification")


class ExpertConfig(Strict):
    """Expert, its data, and its name in the coefficient file: `task`, by default its reference."""

    model: str
    data: DataConfig | None = None
    task: str = Field(default_factory=lambda given: given.get("model", ""))


class SchedulerConfig(Strict):
    """Schedule of the learning rate: times `gamma` every `step` epochs."""

    step: Count = 100
    gamma: Annotated[Positive, Field(le=1)] = 0.1


class LoopConfig(Strict):
    """Settings of a training loop."""

    epochs: Count = 500
    batch_size: Count = 8
    gradient_accumulation: Count = 1
    learning_rate: Positive = 1e-3
    seed: Annotated[Integer, Field(ge=0, lt=2**31)] = 0
    max_steps: Count | None = None
    evaluate_every: Count | None = None
    checkpoint_every: Count = 100
    patience: Annotated[Integer, Field(ge=0)] = 20


class TrainingConfig(LoopConfig):
    """Settings of the training of coefficients, whose `learning_rate` is Adam's."""

    penalty: NonNegative | None = None
    rehearsal_weight: Positive = 1.0
    scheduler: SchedulerConfig = SchedulerConfig()


# Bases of components, by the methods that have them.
COMPONENTS = {*get_args(Basis)} - {"task_vector"}


class TrainConfig(Strict):
    """Settings of a `train.yml`."""

    needs_data: ClassVar[bool] = True

    base_model: str
    models: Annotated[tuple[ExpertConfig, ...], Field(min_length=1)]
    task: Task
    rehearsal: DataConfig | None = None
    basis: Basis = "task_vector"
    ace: AceOptions = AceOptions()
    ace_plus: PlusOptions = PlusOptions()
    granularity: Granularity = "tensor"
    learner: LearnerConfig = LearnerConfig()
    loss: Literal["answers", "entropy"] = "answers"
    labels: Labels | None = None
    top_k: Count = 32
    training: TrainingConfig = TrainingConfig()
    exclude: tuple[str, ...] = ()
    dtype: Dtype = "float32"
    mixed_precision: Literal["no", "bf16"] = "no"
    trust_remote_code: bool = False

    @property
    def sources(self) -> tuple[tuple[str, DataConfig], ...]:
        """All data by the name of its teacher: the experts' tasks, and last the rehearsal."""
        experts = tuple((one.task, one.data) for one in self.models if one.data is not None)
        return experts if self.rehearsal is None else (*experts, ("rehearsal", self.rehearsal))

    def labels_of(self, data: DataConfig) -> Labels:
        """Return the labels as given; else soft where in free text no token is the right one."""
        free = data.text is not None or data.messages is not None
        return self.labels or ("soft" if free and self.task == "causal-lm" else "hard")

    @property
    def penalty(self) -> float:
        """Penalty as given; else 3 where only it holds what no sample of a language model asks."""
        if self.training.penalty is not None:
            return self.training.penalty
        alone = self.task == "causal-lm" and self.rehearsal is None
        return 3.0 if alone and self.options is not None else 0.0

    @property
    def options(self) -> PlusOptions | None:
        """Parameters of the merge that the components are of; None for task vectors."""
        return None if self.basis == "task_vector" else getattr(self, self.basis)

    @model_validator(mode="before")
    @classmethod
    def _start(cls, values: Any) -> Any:
        """Let coefficients of components start at 1."""
        if isinstance(values, dict) and values.get("basis") in COMPONENTS:
            learner = values.get("learner", {})
            if isinstance(learner, dict):
                return {**values, "learner": {"initial": 1.0, **learner}}
        return values

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        classifier, tasks = self.task != "causal-lm", [one.task for one in self.models]
        twice = max(tasks, key=tasks.count)
        others = COMPONENTS & self.model_fields_set - {self.basis}
        scaled = self.options is not None and "scale" in self.options.model_fields_set
        mistakes = [
            (classifier and self.rehearsal, "rehearsal is for language models"),
            (
                self.loss == "entropy" and (self.labels or self.rehearsal),
                "loss: entropy takes no answers: leave out labels and rehearsal",
            ),
            (others, f"there are parameters of another basis than {self.basis}"),
            (scaled, f"{self.basis}: scale cannot be chosen; a `lambda` goes into merge.yml"),
            (tasks.count(twice) > 1, f"two experts are called {twice!r}: give each its own `task`"),
        ]
        for expert in self.models:
            needed = expert.data is None and (self.needs_data or classifier)
            mistakes.append((needed, f"{expert.task} has no data: add samples of what it is for"))
        for name, data in self.sources:
            data.check_task(self.task, f"the data of {name}")
            truth = "label" if classifier else "completion"
            lacks = truth not in data.columns and (classifier or data.prompt is not None)
            message = f"labels: true needs the `{truth}` column of {name}"
            mistakes.append((self.labels == "true" and lacks, message))
        for wrong, message in mistakes:
            if wrong:
                raise ValueError(message)
        return self


class DistillTraining(LoopConfig):
    """Settings of the distillation loop; `learning_rate` is the peak of AdamW's."""

    epochs: Count = 10
    batch_size: Count = 16
    learning_rate: Positive = 5e-5
    checkpoint_every: Count = 500
    patience: Annotated[Integer, Field(ge=0)] = 0


class DistillConfig(Strict):
    """Settings of a `distill.yml`: `alpha` α, the share of hard labels, and `temperature` T."""

    teacher: str
    student: str
    task: Literal["causal-lm", Classification]
    data: DataConfig
    alpha: Fraction = 0.7
    temperature: Positive = 4.0
    training: DistillTraining = DistillTraining()
    dtype: Dtype = "float32"
    mixed_precision: Literal["no", "bf16"] = "no"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _check(self) -> DistillConfig:
        self.data.check_task(self.task, "the data")
        return self
