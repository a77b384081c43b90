# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace merge --unplanned`: what mergekit would leave out gets into the result."""

from __future__ import annotations

import json

import pytest
import torch
from checkpoints import ace_config, add, save_family, save_tokenizer, tiny_llama
from families import tensors
from reference import naive_tensor, task_vector_error
from sharded import SHARDS, VOCABULARY, finished, linear, reported

HEAD = {
    "mtp.layers.0.proj.weight": torch.Size([24, 32]),
    "mtp.layers.1.proj.weight": torch.Size([24, 32]),
    "mtp.norm.weight": torch.Size([32]),
}


@pytest.fixture
def paths(tmp_path) -> list[str]:
    """Llamas with a head that predicts several tokens, which mergekit knows nothing of."""
    paths, rng = save_family(tiny_llama(), tmp_path), torch.Generator().manual_seed(5)
    origin = {name: torch.randn(shape, generator=rng) for name, shape in HEAD.items()}
    for n, path in enumerate(paths):
        moved = {
            name: tensor + 0.1 * n * torch.randn(tensor.shape, generator=rng)
            for name, tensor in origin.items()
        }
        add(path, **moved)
    return paths


@pytest.mark.parametrize("flags", [(), ("--no-check",)], ids=str)
def test_heads_are_not_lost_unasked(tmp_path, paths, merge, flags):
    text = merge(ace_config(paths), *flags, fails=True)
    assert "no merge of 3 tensors of" in text
    assert "--unplanned merge` merges them" in text
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("treatment", ["base", "merge"])
def test_heads_are_copied_or_merged(tmp_path, paths, treatment, merge, mergekit_yaml):
    """They are in shards, reports and index; what was planned stays as it was."""
    report, out = tmp_path / "report.jsonl", tmp_path / "merged"
    settings = ace_config(paths, parameters={"report": str(report)})
    merge(settings, *SHARDS, "--unplanned", treatment)
    lines = reported(report)
    assert len(lines) == len(set(lines))
    assert (HEAD.keys() <= set(lines)) == (treatment == "merge")
    assert all((out / shard).stat().st_size < 16_000 for shard in finished(out))
    ours, theirs = tensors(out), tensors(mergekit_yaml(settings, out="theirs"))
    assert ours.keys() - theirs.keys() == HEAD.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    base, *experts = map(tensors, paths)
    for name, shape in HEAD.items():
        layout = "matrix" if len(shape) == 2 else "mean"
        expected = naive_tensor(base[name], [expert[name] for expert in experts], layout)
        error = task_vector_error(ours[name], expected, base[name])
        assert error <= 5e-5 if treatment == "merge" else torch.equal(ours[name], base[name])
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert list(index["weight_map"])[-3:] == list(HEAD)
    other = {"base": "merge", "merge": "base"}[treatment]
    text = merge(settings, *SHARDS, "--unplanned", other, fails=True)
    assert "changed since then: unplanned" in text


def test_rows_of_tokens_follow_the_tokenizer(tmp_path, merge):
    """A head has a row per token of the result, though only the embeddings are planned."""
    paths = save_family(tiny_llama(), tmp_path)
    for n, path in enumerate(paths):
        save_tokenizer(path, VOCABULARY[:38])  # two rows of the embeddings are padding
        rows = torch.arange(40.0)[:, None] + 100 * n + torch.zeros(40, 32)
        add(path, mtp__head__weight=rows)
    for treatment, mean in (("base", 0), ("merge", 100)):
        settings = linear(paths, tokenizer={"source": paths[0]})
        merge(settings, "--unplanned", treatment, out=f"{treatment}-merged")
        merged = tensors(tmp_path / f"{treatment}-merged")
        assert merged["model.embed_tokens.weight"].shape[0] == 38
        assert torch.allclose(merged["mtp.head.weight"][:, 0], torch.arange(38.0) + mean)


def test_another_shape_is_an_error_before_anything_is_merged(tmp_path, paths, merge):
    add(paths[2], mtp__norm__weight=torch.ones(31))
    text = merge(ace_config(paths), "--unplanned", "merge", fails=True)
    assert all(part in text for part in ("mtp.norm.weight", paths[2], "31"))
    assert not (tmp_path / "merged").exists()
    merge(ace_config(paths), "--unplanned", "base")
