# SPDX-License-Identifier: Apache-2.0
"""What a model knows: loss, next tokens, right answers, and how it goes on from prompts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from experts import DEVICE
from safetensors.torch import load_file
from sources import Data, Part, Texts
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from mergekit_ace.calibration.layerwise import half_precision

BATCH = 8  # sequences at a time
ANSWER = 32  # tokens that a prompt is gone on with
State = dict[str, Tensor]
Scores = dict[str, dict[str, Any]]


@dataclass(frozen=True)
class Sizes:
    """How many sequences of 256 tokens are measured.

    Attributes:
        validation: per expert, to choose λ by.
        test: per expert.
        untrained: of each text that nobody learned.
    """

    validation: int
    test: int
    untrained: int


class Examiner:
    """A base model in memory whose weights are replaced by those of one model after another.

    Args:
        base: folder of the base model.
        experts: texts of what experts learned, by name.
        untrained: texts of what nobody learned.
        sizes: of the exams.
        data: with the prompts.
    """

    def __init__(
        self,
        base: Path,
        experts: Mapping[str, Texts],
        untrained: Mapping[str, Texts],
        sizes: Sizes,
        data: Data,
    ):
        self.tokenizer = AutoTokenizer.from_pretrained(base)
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        self.model.to(DEVICE).eval()
        self.base = read_tensors(base)
        self.prompts = data.prompts
        self.options = {name: self._first_tokens(texts) for name, texts in experts.items()}
        self.exams: dict[Part, dict[str, tuple[Tensor, Tensor]]] = {}
        counts: dict[Part, int] = {"validation": sizes.validation, "test": sizes.test}
        for part, count in counts.items():
            self.exams[part] = {
                name: texts.sequences(part, self.tokenizer, count)
                for name, texts in experts.items()
            }
        self.exams["test"] |= {
            name: texts.sequences("test", self.tokenizer, sizes.untrained)
            for name, texts in untrained.items()
        }

    def _first_tokens(self, texts: Texts) -> Tensor | None:
        """Return the first token of every option; None where answers are free."""
        options = texts.source.options
        if not options:
            return None
        words = [f" {option}" for option in options]
        first = [ids[0] for ids in self.tokenizer(words, add_special_tokens=False)["input_ids"]]
        if len(set(first)) < len(first):
            raise SystemExit(
                f"Two options of {texts.source.name} begin with the same token, by which they are "
                "compared. Choose other words for them."
            )
        return torch.tensor(first, device=DEVICE)

    @torch.no_grad()
    def put(self, folder: Path, scale: float = 1.0) -> None:
        """Write base + scale · (model − base) into the model."""
        tensors = read_tensors(folder)
        if scale != 1.0:
            for name, base in self.base.items():
                if base.is_floating_point():
                    tensors[name] = torch.lerp(base.float(), tensors[name].float(), scale)
        missing, unexpected = self.model.load_state_dict(tensors, strict=False)
        stored = {tensor.data_ptr() for name, tensor in self.model.state_dict().items()
                  if name in tensors}  # fmt: skip
        state = self.model.state_dict()
        lost = [name for name in missing if state[name].data_ptr() not in stored]
        if lost or unexpected:
            raise SystemExit(f"{folder} is not of the base's architecture: {lost or unexpected}")

    def examine(self, part: Part) -> Scores:
        """Return the scores of the model as it is, by name of the text; see `score_text`."""
        return {
            name: self.score_text(ids, labels, self.options.get(name))
            for name, (ids, labels) in self.exams[part].items()
        }

    @torch.no_grad()
    def score_text(self, ids: Tensor, labels: Tensor, options: Tensor | None) -> dict[str, Any]:
        """Return lists with a number per sequence, and per question.

        `loss` is the sum over the scored tokens, `tokens` their number, `right` how many of them
        are the model's first choice. `answers` has a 1 for every question that is answered right:
        its first token is the most likely one of all options, or, where there are none, greedy
        decoding would write the answer to its end.

        Args:
            ids: tokens, (n, length).
            labels: the same, −100 where nothing is scored.
            options: first tokens of all possible answers.
        """
        scores: dict[str, list] = {"loss": [], "tokens": [], "right": [], "answers": []}
        for batch, wanted in zip(ids.split(BATCH), labels.split(BATCH), strict=True):
            batch, wanted = batch.to(DEVICE), wanted.to(DEVICE)[:, 1:]
            asked = wanted != -100
            with half_precision(DEVICE):
                logits = self.model(input_ids=batch).logits[:, :-1][asked].float()
            losses = torch.zeros_like(wanted, dtype=torch.float32)
            losses[asked] = cross_entropy(logits, wanted[asked], reduction="none")
            right = torch.zeros_like(asked)
            right[asked] = logits.argmax(-1) == wanted[asked]
            scores["loss"] += [round(value, 3) for value in losses.sum(1).tolist()]
            scores["tokens"] += asked.sum(1).tolist()
            scores["right"] += right.sum(1).tolist()
            if bool(asked.all()):
                continue
            if options is not None:
                right[asked] = options[logits[:, options].argmax(-1)] == wanted[asked]
            scores["answers"] += right_answers(asked, right, only_first=options is not None)
        return {kind: values for kind, values in scores.items() if values}

    @torch.no_grad()
    def answer_prompts(self) -> list[str]:
        """Return how the model goes on from every prompt, by greedy decoding."""
        if not self.prompts:
            return []
        texts = [self._as_text(prompt) for prompt in self.prompts]
        tokenizer = self.tokenizer
        tokenizer.padding_side = "left"
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        with half_precision(DEVICE):
            written = self.model.generate(
                input_ids=batch["input_ids"].to(DEVICE),
                attention_mask=batch["attention_mask"].to(DEVICE),
                max_new_tokens=ANSWER,
                do_sample=False,
                pad_token_id=tokenizer.pad_token_id,
            )
        new = written[:, batch["input_ids"].shape[1] :]
        return tokenizer.batch_decode(new, skip_special_tokens=True)

    def _as_text(self, prompt: Mapping[str, str]) -> str:
        if "chat" not in prompt:
            return prompt["text"]
        if not self.tokenizer.chat_template:
            return prompt["chat"]
        talk = [{"role": "user", "content": prompt["chat"]}]
        return self.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True)


def read_tensors(folder: Path) -> State:
    """Return the tensors of a checkpoint, whatever the number of its files."""
    tensors: State = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors


def right_answers(asked: Tensor, right: Tensor, *, only_first: bool) -> list[int]:
    """Return a 1 for each run of asked tokens that is right, from its first token to its last.

    Args:
        asked: whether a token belongs to an answer, (n, length).
        right: whether it was chosen, (n, length).
        only_first: look at the first token of each answer only.
    """
    answers = []
    for row, good in zip(asked.tolist(), right.tolist(), strict=True):
        inside = False
        for is_asked, is_right in zip(row, good, strict=True):
            if is_asked and not inside:
                answers.append(int(is_right))
            elif is_asked and not only_first:
                answers[-1] &= int(is_right)
            inside = is_asked
    return answers


def mean_loss(score: Mapping[str, Sequence[float]]) -> float:
    """Return nats per scored token."""
    return sum(score["loss"]) / sum(score["tokens"])


def share_kept(
    base: Mapping[str, Sequence[float]],
    expert: Mapping[str, Sequence[float]],
    merged: Mapping[str, Sequence[float]],
) -> tuple[float, list[float]]:
    """Return how much of an expert's gain over the base a merge keeps, 1 being all of it.

    Also returned is what every sequence contributes to the error of that ratio: the square root of
    the sum of their squares is its standard error. Those of two merges may be subtracted, for the
    error of their difference.
    """
    gained = [b - e for b, e in zip(base["loss"], expert["loss"], strict=True)]
    kept = [b - m for b, m in zip(base["loss"], merged["loss"], strict=True)]
    share = sum(kept) / sum(gained)
    count = len(gained)
    correction = (count / (count - 1)) ** 0.5 if count > 1 else 1.0
    away = [(k - share * g) / sum(gained) * correction for k, g in zip(kept, gained, strict=True)]
    return share, away
