# SPDX-License-Identifier: Apache-2.0
"""What the merged model is told about its answers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, kl_div

from mergekit_ace.training.config import Labels
from mergekit_ace.training.examples import Examples


def collate_labels(examples: Examples, indices: list[int], labels: Labels) -> dict[str, Tensor]:
    """The labels of some samples end to end, over their P positions.

    ``hard`` and ``true`` give `classes`, (P,); ``soft`` gives `log_probabilities` and `classes`,
    (P, k). `target`, (P,), is what counts as right: the truth where the data has it.
    """

    def gather(name: str) -> Tensor:
        return torch.cat([examples.field(name, index) for index in indices])

    target = gather("true" if "true" in examples.fields else "hard")
    if labels == "soft":
        return {
            "log_probabilities": gather("soft_values"),
            "classes": gather("soft_indices"),
            "target": target,
        }
    return {"classes": gather(labels), "target": target}


def summed_loss(logits: Tensor, labels: dict[str, Tensor]) -> Tensor:
    """Cross-entropy to hard labels (Eq. 7), or KL from the teacher to the merge (Eq. 32), summed.

    Args:
        logits: (P, C).
        labels: see `collate_labels`. Where only the k likeliest classes of the teacher are known,
            the rest of both distributions counts as one class more.
    """
    logits = logits.float()
    if "log_probabilities" not in labels:
        return cross_entropy(logits, labels["classes"], reduction="sum")
    mine = logits.log_softmax(-1).gather(-1, labels["classes"])
    teacher = labels["log_probabilities"]
    loss = (teacher.exp() * (teacher - mine)).sum()
    if labels["classes"].shape[-1] < logits.shape[-1]:
        rest, my_rest = _rest(teacher), _rest(mine)
        loss = loss + (rest.exp() * (rest - my_rest)).sum()
    return loss


def distillation_loss(
    student: Tensor, teacher: Tensor | None, labels: Tensor, alpha: float, temperature: float
) -> Tensor:
    """Eq. 8, summed: α CE(student, labels) + (1 − α) T² KL(teacher at T ‖ student at T).

    Args:
        student, teacher: logits, (P, C); without a teacher's, its words are the only labels, and
            the loss is their cross-entropy.
        labels: (P,), the teacher's arg max, or its words.
        alpha: α, the share of the hard labels.
        temperature: T > 0.
    """
    hard = cross_entropy(student.float(), labels, reduction="sum")
    if teacher is None:
        return hard
    target = (teacher.float() / temperature).log_softmax(-1)
    guess = (student.float() / temperature).log_softmax(-1)
    soft = kl_div(guess, target, reduction="sum", log_target=True)
    return alpha * hard + (1 - alpha) * temperature**2 * soft


def _rest(log_probabilities: Tensor) -> Tensor:
    """Logarithm of the probability that the given classes leave, (P,)."""
    left = 1 - log_probabilities.exp().sum(-1)
    return left.clamp(min=torch.finfo(left.dtype).eps).log()
