# SPDX-License-Identifier: Apache-2.0
"""Settings of a `train.yml` and of a `distill.yml`; unknown keys and wrong types are errors."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from mergekit_ace.algebra.ace import AceOptions, RelativeOptions
from mergekit_ace.algebra.records import Fraction, Integer, NonNegative, Number
from mergekit_ace.files.coefficients import Basis, Granularity
from mergekit_ace.learner import LearnerConfig

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
Storage = Literal["disk", "cpu", "device"]
Count = Annotated[Integer, Field(ge=1)]
Positive = Annotated[Number, Field(gt=0)]


class Strict(BaseModel):
    """Base of all settings: unknown keys are errors, and nothing changes afterwards."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataConfig(Strict):
    """Data of one teacher, and which of its columns are used.

    Attributes:
        path: a .jsonl, .json, .csv, .parquet or .txt file, a folder that `datasets` knows or has
            saved, or the name of a data set on the Hub.
        name: configuration of a data set on the Hub.
        split: which is read.
        validation_split, test_split: splits for these purposes; by default a tenth each of what is
            read, held out.
        samples: how many are read, drawn at random by the seed; all by default.
        held_out: of a named validation or test split at most so many.
        text, text_pair: columns of texts; with ``text`` a language model is supervised at every
            token; a masked one at the masks in it, or at some that are put there.
        prompt, completion: columns; a language model is supervised on the completion. Without a
            completion (or null) the expert writes its own, greedily.
        messages: column of chat messages, through the tokenizer's template. Supervised on all
            answers of the assistant where the template marks them by ``{% generation %}``, else on
            the last one. Where the last message is not the assistant's, the expert writes that
            answer, and it alone is supervised.
        image: column of images, or of pixel values (channels, height, width).
        prompts: of each class, one or several, in the order of their numbers; the text tower of a
            CLIP makes a head of them.
        label: column of the true class, 0, 1, …; only evaluation sees it, unless ``labels: true``.
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


def _check_input(task: Task, data: DataConfig, whose: str) -> None:
    """Raise ValueError unless the data has a column that models of `task` read."""
    allowed = {
        "causal-lm": {"text", "prompt", "messages"},
        "seq2seq-lm": {"prompt"},
        "masked-lm": {"text"},
        "sequence-classification": {"text"},
        "image-classification": {"image"},
        "zero-shot-image-classification": {"image"},
    }[task]
    if not allowed & data.columns.keys():
        columns = " or ".join(sorted(allowed))
        raise ValueError(f"{whose} needs the column {columns} for task: {task}")
    if (data.prompts is not None) != (task == "zero-shot-image-classification"):
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
    """Schedule of the learning rate.

    Attributes:
        kind: ``step``: it is multiplied by `gamma` every `step` epochs. ``linear``: with every
            step, to zero at the end of training.
        step, gamma: of the former.
    """

    kind: Literal["step", "linear"] = "step"
    step: Count = 100
    gamma: Annotated[Number, Field(gt=0, le=1)] = 0.1


class LoopConfig(Strict):
    """Settings of a training loop.

    Attributes:
        epochs: passes over the data of the largest expert; smaller sets start over.
        batch_size: samples per expert, process and backward pass.
        gradient_accumulation: backward passes per expert and step.
        seed: of what is drawn at the start, the splits and the order of samples.
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
        penalty: ≥ 0, times the mean square of how far the coefficients are from where they start,
            is added to the loss. By default see `TrainConfig.penalty`.
        rehearsal_weight: how much the answers of the base to the rehearsal weigh in the loss, those
            of all experts together being 1.
        patience: evaluations without improvement after which training ends; 0: never.
    """

    penalty: NonNegative | None = None
    rehearsal_weight: Positive = 1.0
    scheduler: SchedulerConfig = SchedulerConfig()
    patience: Annotated[Integer, Field(ge=0)] = 20


class ComparisonConfig(Strict):
    """Merges that the result is compared with at the end, on the test split.

    Attributes:
        task_arithmetic: weights to try, where the basis is task vectors.
        scale: λ to try, where it is components.
        direct: train coefficients without a learner, too; as long as the training itself.
    """

    task_arithmetic: tuple[Number, ...] = (0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
    scale: tuple[Number, ...] = (0.7, 0.85, 1.2, 1.4)
    direct: bool = True


class TrainConfig(Strict):
    """Settings of a `train.yml`.

    Attributes:
        base_model: the model that all experts were fine-tuned from.
        models: at least one expert.
        task: what the models do.
        rehearsal: data that the merge should answer as the base model does, so that nothing else
            is lost; for language models.
        basis: what the coefficients multiply: the experts' task vectors, what TIES keeps of them
            (``ties``), or their components in a merge by `ace` or `ace_relative`; training then
            starts at that merge.
        ace, ace_relative: parameters of these methods, for a basis of that name.
        component_dtype: in which components are kept on disk.
        granularity: one coefficient per expert and ``tensor`` (the paper's layer-wise), per
            transformer ``block``, per ``kind`` of tensor, alike in all blocks, or per expert
            (``task``).
        loss: ``answers``: how far the merge is from the labels. ``entropy``: how undecided it is
            itself, whatever the experts answer (AdaMerging).
        labels: ``hard`` (the expert's arg max), ``soft`` (its distribution) or ``true``; see
            `labels_of` for the default.
        top_k: how many log-probabilities of a language model's soft label are kept.
        exclude: substrings of tensor names that keep the base's values.
        expert_storage: where the experts' weights lie during training: ``disk`` (memory-mapped),
            ``cpu`` or ``device``.
        dtype: of the merged model during training.
        mixed_precision: of its forward pass, as accelerate has it.
        device_map: ``auto`` spreads a model over several GPUs.
        trust_remote_code: as in transformers.
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
    compare: ComparisonConfig = ComparisonConfig()
    exclude: tuple[str, ...] = ()
    expert_storage: Storage = "disk"
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
        """Parameters of the merge that the components are of; None where there are no such."""
        return {"ace": self.ace, "ace_relative": self.ace_relative}.get(self.basis)

    @model_validator(mode="before")
    @classmethod
    def _start(cls, values: Any) -> Any:
        """Let coefficients of components start at 1."""
        if isinstance(values, dict) and values.get("basis") in ("ace", "ace_relative"):
            learner = values.get("learner", {})
            if isinstance(learner, dict):
                return {**values, "learner": {"initial": 1.0, **learner}}
        return values

    @model_validator(mode="after")
    def _check(self) -> TrainConfig:
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
        if self.device_map is not None and self.task not in LanguageTask:
            raise ValueError("device_map is for language models; classifiers' heads change place")
        tasks = [expert.task for expert in self.models]
        twice = sorted({task for task in tasks if tasks.count(task) > 1})
        if twice:
            raise ValueError(f"two experts are called {twice[0]!r}: give each a `task` of its own")
        if self.loss == "entropy" and self.rehearsal is not None:
            raise ValueError(
                "loss: entropy takes no answers, and the base's are what rehearsal is for: leave "
                "out the rehearsal, or train with loss: answers"
            )
        if self.loss == "entropy" and self.labels is not None:
            raise ValueError(f"loss: entropy takes no answers: leave out labels: {self.labels}")
        if self.rehearsal is not None and self.task not in LanguageTask:
            raise ValueError("rehearsal is for language models: a base has no classifier's head")
        for expert in self.models:
            if expert.data is None and (self.needs_data or self.task != "causal-lm"):
                raise ValueError(f"{expert.task} has no data: add samples of what it is for")
        for name, data in self.sources:
            self._check_columns(name, data)
        return self

    def _check_columns(self, name: str, data: DataConfig) -> None:
        _check_input(self.task, data, f"the data of {name}")
        if self.labels != "true":
            return
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
        task: what both do.
        data: unlabelled data of the teacher's task.
        signal: of a language model: ``logits`` (both have one tokenizer: Eq. 8) or ``text`` (the
            teacher writes the completions, the student learns them as hard labels); ``auto`` takes
            logits where the tokenizers agree.
        alpha: share of the hard labels in the loss, 0 to 1.
        temperature: T of the soft ones.
        dtype: of the student during training.
        mixed_precision: of its forward pass, as accelerate has it.
        trust_remote_code: as in transformers.
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
        _check_input(self.task, self.data, "the data")
        if self.signal == "text" and self.data.prompt is None:
            raise ValueError("signal: text needs the `prompt` column: the teacher answers it")
        return self
