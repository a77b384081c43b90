# SPDX-License-Identifier: Apache-2.0
"""What a `distill.yml` may say."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from mergekit_ace.algebra.records import Fraction, Number
from mergekit_ace.training.config import Count, DataConfig, Positive, Strict, Task


class DistillTraining(Strict):
    """The loop.

    Attributes:
        epochs: passes over the data.
        batch_size: samples per process and backward pass.
        gradient_accumulation: backward passes per step.
        learning_rate: peak of AdamW's, reached after `warmup`, then falling along a cosine to 0.
        warmup: share of all steps, 0 to 1.
        weight_decay: of AdamW.
        seed: of a new head, the splits and the order of samples.
        max_steps: ends training earlier.
        evaluate_every: steps between evaluations on the held-out split; an epoch by default.
        checkpoint_every: steps between checkpoints.
    """

    epochs: Count = 10
    batch_size: Count = 16
    gradient_accumulation: Count = 1
    learning_rate: Positive = 5e-5
    warmup: Fraction = 0.1
    weight_decay: Annotated[Number, Field(ge=0)] = 0.01
    seed: Annotated[int, Field(ge=0, lt=2**31)] = 0
    max_steps: Count | None = None
    evaluate_every: Count | None = None
    checkpoint_every: Count = 500


class DistillConfig(Strict):
    """A whole `distill.yml`.

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
        training: see `DistillTraining`.
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
        wanted = {
            "causal-lm": {"text", "prompt", "messages"},
            "sequence-classification": {"text"},
            "image-classification": {"image"},
        }.get(self.task)
        if wanted is None:
            raise ValueError(
                f"task: {self.task} cannot be distilled; causal-lm and both kinds of "
                "classification can"
            )
        if not wanted & self.data.columns.keys():
            raise ValueError(
                f"the data needs the column {' or '.join(sorted(wanted))} for task: {self.task}"
            )
        if self.signal == "text" and self.data.prompt is None:
            raise ValueError("signal: text needs the `prompt` column: the teacher answers it")
        return self
