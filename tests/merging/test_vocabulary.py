# SPDX-License-Identifier: Apache-2.0
"""A union's new tokens have the same numbers in every run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from checkpoints import ace_config, fine_tuned, tiny_llama
from sharded import INPUT_SHARDS, SHARDS, command, contents, save_llamas, shards_of, write_config
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

NEW = [f"new{n}" for n in range(30)]


def save_words(path: str, words: list[str]) -> None:
    tokenizer = Tokenizer(WordLevel({w: n for n, w in enumerate(words)}, unk_token=words[0]))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0]).save_pretrained(path)


@pytest.fixture
def config(tmp_path) -> Path:
    """Of a family whose expert has thirty words of its own, in its vocabulary."""
    paths = save_llamas(tmp_path)
    words = [f"t{n}" for n in range(40)]
    for path in paths:
        save_words(path, words)
    grown = fine_tuned(tiny_llama(), seed=10)
    grown.resize_token_embeddings(70, mean_resizing=False)
    for file in Path(paths[1]).iterdir():
        file.unlink()
    grown.save_pretrained(paths[1], max_shard_size=INPUT_SHARDS)
    save_words(paths[1], words + NEW)
    return write_config(tmp_path / "merge.yml", ace_config(paths, tokenizer={"source": "union"}))


def test_the_same_in_every_run(tmp_path, config):
    one, two = tmp_path / "one" / "merged", tmp_path / "two" / "merged"
    command(config, one, *SHARDS)
    command(config, two, *SHARDS)
    assert contents(one) == contents(two)
    _, *added = json.loads((one / "tokenizer.json").read_text())["added_tokens"]
    assert [token["content"] for token in added] == NEW  # as the expert numbers them


def test_a_repaired_merge_has_the_same(tmp_path, config):
    out = tmp_path / "merged"
    command(config, out, *SHARDS)
    before = contents(out)
    (out / shards_of(out)[0]).unlink()
    (out / "tokenizer.json").unlink()
    command(config, out, *SHARDS, "--resume")
    assert contents(out) == before
