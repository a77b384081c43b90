# SPDX-License-Identifier: Apache-2.0
"""Settings of a `train.yml` and of a `distill.yml`; unknown keys and wrong types are errors.

`examples/training/README.md` is the reference of all settings.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mergekit_ace.algebra.ace import AceOptions, RelativeOptions
from mergekit_ace.algebra.learner import LearnerConfig
from mergekit_ace.algebra.task_vectors import Fraction, Integer, NonNegative, Number
from mergekit_ace.methods.coefficients import Basis, Granularity

Task = Literal[
    "causal-lm",
    "seq2seq-lm",
    "masked-lm",
    "sequence-classification",
    "image-classification",
    "zero-shot-image-classification",
]
LanguageTask = ("causal-lm", "seq2seq-lm", "masked-lm")
Labels = Literal["hard", "soft", "true"]
Count = Annotated[Integer, Field(ge=1)]
Positive = Annotated[Number, Field(gt=0)]

# The columns that models of a task read.
_COLUMNS: dict[str, tuple[str, ...]] = {
    "causal-lm": ("messages", "prompt", "text"),
    "seq2seq-lm": ("prompt",),
    "masked-lm": ("text",),
    "sequence-classification": ("text",),
    "image-classification": ("image",),
    "zero-shot-image-classification": ("image",),
}


class Strict(BaseModel):
    """Base of all settings: unknown keys are errors, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Strict):
    """Data of one teacher, and which of its columns are used.

    Attributes:
        path: file, folder, or name of a data set on the Hub; `name` is its configuration there.
        validation_split, test_split: by default a tenth each of `split` is held out.
        samples: how many are read, drawn at random by the seed; all by default.
        held_out: of a named validation or test split at most so many.
        text, text_pair, prompt, completion, messages, image, label: columns.
        prompts: texts of each class for the text tower of a CLIP, in the order of the labels.
        masking_rate: share of the tokens of a text without masks that are masked.
        max_length: in tokens; longer texts are cut.
        max_new_tokens: of completions that the expert writes.
    """

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
    masking_rate: Annotated[Number, Field(gt=0, le=1)] = 0.15
    max_length: Count = 1024
    max_new_tokens: Count = 256

    @model_validator(mode="after")
    def _check(self) -> DataConfig:
        kinds = [n for n in ("text", "prompt", "messages", "image") if n in self.columns]
        if len(kinds) != 1:
            raise ValueError(
                f"data {self.path} names {' and '.join(kinds) or 'none'} of the columns text, "
                "prompt, messages, image; give exactly one"
            )
        for inner, outer in (("completion", "prompt"), ("text_pair", "text")):
            if inner in self.columns and outer not in self.columns:
                raise ValueError(f"data {self.path}: {inner} goes with {outer}, which is missing")
        return self

    @property
    def columns(self) -> dict[str, str]:
        """Columns that are read, by purpose."""
        purposes = ("text", "text_pair", "prompt", "completion", "messages", "image", "label")
        named = {purpose: getattr(self, purpose) for purpose in purposes}
        return {purpose: column for purpose, column in named.items() if column is not None}

    def check_task(self, task: Task, whose: str) -> None:
        """Raise ValueError unless there is a column that models of `task` read."""
        if not set(_COLUMNS[task]) & self.columns.keys():
            columns = " or ".join(_COLUMNS[task])
            raise ValueError(f"{whose} needs the column {columns} for task: {task}")
        if (self.prompts is not None) != (task == "zero-shot-image-classification"):
            raise ValueError(
                f"{whose}: `prompts` of the classes are what task: zero-shot-image-classification "
                "needs, and no other task takes them"
            )


class ExpertConfig(Strict):
    """Expert and its data.

    Attributes:
        model: mergekit's reference: folder or Hub name, `@revision`, `+adapter`.
        data: see `DataConfig`. Without it, language models write texts of their own for
            `statistics` and `calibrate`.
        task: name of the expert in the coefficient file; its model reference by default.
    """

    model: str
    data: DataConfig | None = None
    task: str = Field(default_factory=lambda given: given.get("model", ""))


class SchedulerConfig(Strict):
    """Schedule of the learning rate: times `gamma` every `step` epochs, or ``linear`` to zero."""

    kind: Literal["step", "linear"] = "step"
    step: Count = 100
    gamma: Annotated[Number, Field(gt=0, le=1)] = 0.1


class LoopConfig(Strict):
    """Settings of a training loop.

    Attributes:
        epochs: passes over the largest data set; smaller ones start over.
        batch_size: samples per expert, process and backward pass.
        gradient_accumulation: backward passes per expert and step.
        max_steps: ends training earlier.
        evaluate_every: steps between evaluations on the held-out split; an epoch by default.
        checkpoint_every: steps between checkpoints.
    """

    epochs: Count = 500
    batch_size: Count = 8
    gradient_accumulation: Count = 1
    learning_rate: Positive = 1e-3
    seed: Annotated[Integer, Field(ge=0, lt=2**31)] = 0
    max_steps: Count | None = None
    evaluate_every: Count | None = None
    checkpoint_every: Count = 100


class TrainingConfig(LoopConfig):
    """Settings of the training of coefficients, whose `learning_rate` is Adam's.

    Attributes:
        penalty: times the mean square of how far the coefficients are from their start; by default
            see `TrainConfig.penalty`.
        rehearsal_weight: weight of the rehearsal in the loss; all experts together have 1.
        patience: evaluations without improvement after which training ends; 0: never.
    """

    penalty: NonNegative | None = None
    rehearsal_weight: Positive = 1.0
    scheduler: SchedulerConfig = SchedulerConfig()
    patience: Annotated[Integer, Field(ge=0)] = 20


class TrainConfig(Strict):
    """Settings of a `train.yml`.

    Attributes:
        rehearsal: data that the merge should answer as the base model does.
        basis: what the coefficients multiply: task vectors, or the components of a merge by `ace`
            or `ace_relative`, where training then starts.
        granularity: what has its own coefficient: a ``tensor`` (the paper's layer-wise), a
            transformer ``block``, a ``kind`` of tensor in all blocks, or an expert (``task``).
        loss: ``answers``: distance from the labels. ``entropy``: of the merge's own answers
            (AdaMerging).
        labels: ``hard`` (the expert's arg max), ``soft`` (its distribution) or ``true``; see
            `labels_of` for the default.
        top_k: log-probabilities in a soft label.
        exclude: substrings of tensor names that keep the base's values.
        dtype, mixed_precision: of the merged model during training, and of its forward pass.
        device_map: ``auto`` spreads a model over several GPUs.
    """

    needs_data: ClassVar[bool] = True

    base_model: str
    models: Annotated[tuple[ExpertConfig, ...], Field(min_length=1)]
    task: Task
    rehearsal: DataConfig | None = None
    basis: Basis = "task_vector"
    ace: AceOptions = AceOptions()
    ace_relative: RelativeOptions = RelativeOptions()
    component_dtype: Literal["float32", "bfloat16"] = "float32"
    granularity: Granularity = "tensor"
    learner: LearnerConfig = LearnerConfig()
    loss: Literal["answers", "entropy"] = "answers"
    labels: Labels | None = None
    top_k: Count = 32
    training: TrainingConfig = TrainingConfig()
    exclude: tuple[str, ...] = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    mixed_precision: Literal["no", "fp16", "bf16"] = "no"
    device_map: Literal["auto"] | None = None
    trust_remote_code: bool = False

    @property
    def sources(self) -> tuple[tuple[str, DataConfig], ...]:
        """All data by the name of its teacher: the experts' tasks, and last the rehearsal."""
        experts = tuple((one.task, one.data) for one in self.models if one.data is not None)
        return experts if self.rehearsal is None else (*experts, ("rehearsal", self.rehearsal))

    def labels_of(self, data: DataConfig) -> Labels:
        """Return the labels that are given; else soft ones where a causal model reads free text.

        Everywhere else they are hard, as in the paper. In free text no token is the one right
        answer, and hard labels make the merge too sure of itself.
        """
        if self.labels is not None:
            return self.labels
        free = data.text is not None or data.messages is not None
        return "soft" if free and self.task == "causal-lm" else "hard"

    @property
    def penalty(self) -> float:
        """Penalty as given, or 3 where components of a language model are learned unrehearsed.

        Nothing else would hold what no sample asks for.
        """
        if self.training.penalty is not None:
            return self.training.penalty
        alone = self.task in LanguageTask and self.rehearsal is None
        return 3.0 if alone and self.options is not None else 0.0

    @property
    def options(self) -> AceOptions | RelativeOptions | None:
        """Parameters of the merge that the components are of; None for task vectors."""
        return {"ace": self.ace, "ace_relative": self.ace_relative}.get(self.basis)

    @model_validator(mode="before")
    @classmethod
    def _start(cls, values: Any) -> Any:
        """Let coefficients of components start at 1."""
        of_components = isinstance(values, dict) and values.get("basis") in ("ace", "ace_relative")
        learner = values.get("learner", {}) if of_components else None
        if isinstance(learner, dict):
            return {**values, "learner": {"initial": 1.0, **learner}}
        return values

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
        self._check_basis()
        self._check_loss()
        if self.device_map is not None and self.task not in LanguageTask:
            raise ValueError("device_map is for language models; classifiers' heads change place")
        if self.rehearsal is not None and self.task not in LanguageTask:
            raise ValueError("rehearsal is for language models: a base has no classifier's head")
        tasks = [expert.task for expert in self.models]
        twice = sorted({task for task in tasks if tasks.count(task) > 1})
        if twice:
            raise ValueError(f"two experts are called {twice[0]!r}: give each a `task` of its own")
        for expert in self.models:
            if expert.data is None and (self.needs_data or self.task != "causal-lm"):
                raise ValueError(f"{expert.task} has no data: add samples of what it is for")
        for name, data in self.sources:
            data.check_task(self.task, f"the data of {name}")
            if self.labels == "true":
                self._check_truth(name, data)
        return self

    def _check_basis(self) -> None:
        for name in ("ace", "ace_relative"):
            if name != self.basis and name in self.model_fields_set:
                raise ValueError(f"there are parameters of {name}, but basis: {self.basis}")
        if self.options is not None and "scale" in self.options.model_fields_set:
            raise ValueError(
                f"{self.basis}: scale cannot be chosen; a `lambda` goes into merge.yml"
            )
        if self.options is not None and self.learner.activation == "softmax":
            raise ValueError(
                f"activation: softmax makes coefficients sum to 1; with basis: {self.basis} they "
                "start at 1 each"
            )

    def _check_loss(self) -> None:
        if self.loss == "entropy" and self.rehearsal is not None:
            raise ValueError(
                "loss: entropy takes no answers, and the base's are what rehearsal is for: leave "
                "out the rehearsal, or train with loss: answers"
            )
        if self.loss == "entropy" and self.labels is not None:
            raise ValueError(f"loss: entropy takes no answers: leave out labels: {self.labels}")

    def _check_truth(self, name: str, data: DataConfig) -> None:
        if self.task not in LanguageTask and data.label is None:
            raise ValueError(f"labels: true needs the `label` column of {name}")
        if data.prompt is not None and data.completion is None:
            raise ValueError(
                f"labels: true needs the `completion` column of {name}; without one the "
                "expert writes the completions, which are not the truth"
            )


class DistillTraining(LoopConfig):
    """Settings of the distillation loop.

    Its `learning_rate` is the peak of AdamW's, reached after a tenth of all steps, then falling
    along a cosine to 0.
    """

    epochs: Count = 10
    batch_size: Count = 16
    learning_rate: Positive = 5e-5
    checkpoint_every: Count = 500


class DistillConfig(Strict):
    """Settings of a `distill.yml`.

    Attributes:
        teacher: the model whose skill is wanted, of any architecture.
        student: the base model of the merge; the result has its architecture and starts there.
        signal: of a language model: ``logits`` (both have one tokenizer: Eq. 8) or ``text`` (the
            teacher writes the completions, the student learns them as hard labels); ``auto`` takes
            logits where the tokenizers agree.
        alpha: share of the hard labels in the loss, 0 to 1.
        temperature: T of the soft ones.
        dtype, mixed_precision: of the student during training, and of its forward pass.
    """

    teacher: str
    student: str
    task: Task
    data: DataConfig
    signal: Literal["auto", "logits", "text"] = "auto"
    alpha: Fraction = 0.7
    temperature: Positive = 4.0
    training: DistillTraining = DistillTraining()
    dtype: Literal["float32", "bfloat16"] = "float32"
    mixed_precision: Literal["no", "bf16"] = "no"
    trust_remote_code: bool = False

    @model_validator(mode="after")
    def _check(self) -> DistillConfig:
        if self.task not in ("causal-lm", "sequence-classification", "image-classification"):
            raise ValueError(
                f"task: {self.task} cannot be distilled; causal-lm, sequence-classification and "
                "image-classification can"
            )
        self.data.check_task(self.task, "the data")
        if self.signal == "text" and self.data.prompt is None:
            raise ValueError("signal: text needs the `prompt` column: the teacher answers it")
        return self
