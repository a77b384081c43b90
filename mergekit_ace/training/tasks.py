# SPDX-License-Identifier: Apache-2.0
"""What the kinds of models differ in: their class, their inputs, and where they answer.

Everything else in the training sees a model as a function from a batch to logits (P, C) at P
supervised positions with C classes or tokens.
"""

from __future__ import annotations

from mergekit_ace.training.classification import ImageClassification, SequenceClassification
from mergekit_ace.training.config import Task
from mergekit_ace.training.language import CausalLanguageModel, Seq2SeqLanguageModel
from mergekit_ace.training.masked import MaskedLanguageModel

Kind = (
    CausalLanguageModel
    | Seq2SeqLanguageModel
    | MaskedLanguageModel
    | SequenceClassification
    | ImageClassification
)


def kind_of(task: Task) -> Kind:
    """The adapter for `task`."""
    return {
        "causal-lm": CausalLanguageModel,
        "seq2seq-lm": Seq2SeqLanguageModel,
        "masked-lm": MaskedLanguageModel,
        "sequence-classification": SequenceClassification,
        "image-classification": ImageClassification,
    }[task]()
