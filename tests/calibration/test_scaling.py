# SPDX-License-Identifier: Apache-2.0
"""The choice of λ, against whole models in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from checkpoints import fine_tuned, tiny_llama
from torch import Tensor
from transformers import LlamaForCausalLM

from mergekit_ace.calibration.calibrate import comparison_batch
from mergekit_ace.calibration.layers import SCALES, choose_scale, scaled_weights


def draw(vocabulary: int, rng: torch.Generator, rows: int) -> dict[str, Tensor]:
    """Texts with a prompt, of which the first one is padded."""
    ids = torch.randint(vocabulary, (rows, 12), generator=rng)
    mask = torch.ones_like(ids)
    mask[0, 9:] = 0
    supervised = mask.bool()
    supervised[:, :4] = False
    return {"input_ids": ids, "attention_mask": mask, "supervised": supervised}


def naive_share(base, merged, experts, batches, scale: float) -> float:
    """Copies of whole models, in float64, one sequence at a time."""

    def log_probabilities(model, ids: Tensor) -> Tensor:
        return model.double()(ids[None]).logits[0].log_softmax(dim=-1)

    between, origin = copy.deepcopy(merged).double(), base.double().state_dict()
    parts = between.state_dict().items()
    between.load_state_dict({n: origin[n] + scale * (part - origin[n]) for n, part in parts})
    shares = []
    for expert, batch in zip(experts, batches, strict=True):
        found = {"base": 0.0, "between": 0.0}
        for ids, mask, wanted in zip(*batch.values(), strict=True):
            ids, wanted = ids[: int(mask.sum())], wanted[: int(mask.sum())]
            target = log_probabilities(copy.deepcopy(expert), ids)[:-1][wanted[1:]]
            for name, model in (("base", base), ("between", between)):
                other = log_probabilities(model, ids)[:-1][wanted[1:]]
                found[name] += float((target.exp() * (target - other)).sum())
        shares.append(1 - found["between"] / found["base"])
    return sum(shares) / len(shares)


@pytest.mark.parametrize("tied", [False, True])
@torch.no_grad()
def test_the_best_scale_is_that_of_whole_models(rng, tied):
    base = tiny_llama(tie_word_embeddings=tied)
    experts = [fine_tuned(base, seed, 0.3) for seed in (1, 2)]
    merged = copy.deepcopy(base)
    for name, tensor in merged.state_dict().items():
        tensor += sum(expert.state_dict()[name] - base.state_dict()[name] for expert in experts)
    vocabulary = base.config.vocab_size
    batches = [draw(vocabulary, rng, 3), draw(vocabulary, rng, 4)]
    stored = [
        {name: tensor.clone() for name, tensor in model.state_dict().items()}
        for model in (base, merged, *experts)
    ]
    if tied:  # as on disk
        for weights in stored:
            del weights["lm_head.weight"]
    config = copy.deepcopy(base.config)
    config.attention_dropout = 0.5  # of training, which this is not
    with torch.device("meta"):
        model = LlamaForCausalLM(config).bfloat16()
    model.model.rotary_emb = copy.deepcopy(base.model.rotary_emb)
    more = torch.ones(3, base.config.hidden_size)  # rows of tokens that the merge has not
    stored[2]["model.embed_tokens.weight"] = torch.cat(
        (stored[2]["model.embed_tokens.weight"], more)
    )
    pairs = list(zip(stored[2:], batches, strict=True))
    scale, share, before = choose_scale(model, stored[0], stored[1], pairs, torch.device("cpu"))
    curve = [naive_share(base, merged, experts, batches, scale) for scale in SCALES]
    assert scale == SCALES[curve.index(max(curve))]
    assert share == pytest.approx(max(curve), abs=2e-3)
    assert before == pytest.approx(curve[SCALES.index(1.0)], abs=2e-3)


def test_what_the_base_lacks_stays_as_merged():
    base, merged = torch.zeros(2, 3), torch.ones(4, 3).bfloat16()
    between = scaled_weights({"a": base}, {"a": merged, "b": merged}, 0.25)
    assert between["a"].dtype == torch.float32
    assert between["a"][:, 0].tolist() == [0.25, 0.25, 1.0, 1.0]
    assert torch.equal(between["b"], merged)
    fewer = scaled_weights({"a": base}, {"a": torch.ones(1, 3)}, 0.5)
    assert fewer["a"].tolist() == [[0.5] * 3]


def test_texts_that_are_compared():
    def texts(length: int, count: int = 1) -> list[dict[str, Tensor]]:
        return [{"input_ids": torch.arange(length)}] * count

    long = comparison_batch(texts(400, 64))
    assert long["input_ids"].shape == (5, 400), "2,048 tokens at most"
    mixed = comparison_batch([*texts(3000), *texts(7), *texts(4)])
    assert mixed["attention_mask"].sum(dim=1).tolist() == [7, 4]
    assert comparison_batch(texts(3000))["input_ids"].shape == (1, 3000)
