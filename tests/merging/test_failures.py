# SPDX-License-Identifier: Apache-2.0
"""What goes wrong is said clearly, and nothing that is finished is lost."""

from __future__ import annotations

import multiprocessing
import resource
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
from checkpoints import ace_config
from click.testing import CliRunner
from filelock import FileLock
from safetensors.torch import load_file, save_file
from sharded import (
    SHARDS,
    assert_same,
    command,
    contents,
    finished,
    linear,
    refusal,
    save_llamas,
    shards_of,
    write_config,
)

from mergekit_ace.cli import ONE_PROCESS_FLAGS, main
from mergekit_ace.merging import shards
from mergekit_ace.merging.output import LOCK_FILE


@pytest.fixture
def config(tmp_path) -> Path:
    return write_config(tmp_path / "merge.yml", ace_config(save_llamas(tmp_path)))


@pytest.fixture
def whole(tmp_path, config) -> Path:
    command(config, tmp_path / "whole" / "merged", *SHARDS)
    return tmp_path / "whole" / "merged"


def test_a_full_disk_is_known_before(tmp_path, config, monkeypatch):
    usage = namedtuple("usage", "total used free")(10**9, 10**9, 1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    text = refusal(config, tmp_path / "merged", *SHARDS)
    assert "needs 0.0 GB more, and its disk has 0.0 GB free" in text
    monkeypatch.undo()
    command(config, tmp_path / "merged", *SHARDS)


def limited(config: Path, out: Path, code) -> None:
    """A merge that cannot write files of more than 10.7 kB, as on a disk that is full by then."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_700, resource.RLIM_INFINITY))
    text = refusal(config, out, *SHARDS)
    print(text)
    code.value = "cannot write to" in text


def test_a_disk_that_is_full_by_then(tmp_path, config, whole):
    """The first four have less, the fifth has more."""
    context = multiprocessing.get_context("fork")
    code = context.Value("b", 0)
    process = context.Process(target=limited, args=(config, tmp_path / "merged", code))
    process.start()
    process.join()
    assert code.value == 1
    before = finished(tmp_path / "merged")
    assert before
    assert not (tmp_path / "merged" / "config.json").exists()
    command(config, tmp_path / "merged", *SHARDS)
    after = finished(tmp_path / "merged")
    assert {name: after[name] for name in before} == before
    assert_same(whole, tmp_path / "merged")


def test_an_output_that_cannot_be_written(tmp_path, config, monkeypatch):
    (tmp_path / "file").write_text("")
    assert "cannot write to" in refusal(config, tmp_path / "file" / "merged")

    def mkdir(self, **named):
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", mkdir)  # the superuser may write anywhere
    assert "Permission denied" in refusal(config, tmp_path / "merged")


def test_a_truncated_input(tmp_path, config):
    path = max(Path(tmp_path, "expert1").glob("*.safetensors"))
    whole = path.read_bytes()
    path.write_bytes(whole[:-10])
    text = refusal(config, tmp_path / "merged")
    assert f"{path} is damaged" in text
    assert contents(tmp_path / "merged") == {}
    path.write_bytes(whole)
    command(config, tmp_path / "merged")


def test_an_input_truncated_later(tmp_path, config, monkeypatch):
    out = tmp_path / "merged"
    path = max(Path(tmp_path, "expert1").glob("*.safetensors"))
    stored, original = path.read_bytes(), shards.merge_shard

    def merge_shard(job, shard, folder, progress):
        if shard.index == 2:
            path.unlink()
            path.write_bytes(stored[:-10])
        return original(job, shard, folder, progress)

    monkeypatch.setattr(shards, "merge_shard", merge_shard)
    text = refusal(config, out, *SHARDS)
    monkeypatch.undo()
    assert f"{path} is damaged" in text
    assert len(finished(out)) >= 2
    assert "changed since it was begun: " in refusal_or_damage(config, out, path, stored)


def refusal_or_damage(config: Path, out: Path, path: Path, stored: bytes) -> str:
    assert f"{path} is damaged" in refusal(config, out, *SHARDS)
    path.write_bytes(stored)  # right again, but who knows: at another time
    return refusal(config, out, *SHARDS)


def test_two_runs_into_one_directory(tmp_path, config):
    out = tmp_path / "merged"
    out.mkdir()
    with FileLock(out / LOCK_FILE):
        assert "another run is writing to" in refusal(config, out, "--overwrite")
    command(config, out)


@pytest.mark.parametrize("count", [1, 3])
def test_failures(tmp_path, config, whole, monkeypatch, count):
    """A shard is tried three times; what is finished stays."""
    attempts, original, out = [], shards.merge_shard, tmp_path / "merged"

    def merge_shard(job, shard, folder, progress):
        attempts.append(shard.index)
        if shard.index == 2 and attempts.count(2) <= count:
            raise RuntimeError("no such luck")
        return original(job, shard, folder, progress)

    monkeypatch.setattr(shards, "merge_shard", merge_shard)
    if count == 3:
        text = refusal(config, out, *SHARDS)
        file = shards_of(out)[0].replace("-00001-", "-00003-")
        assert f"{file}: failed 3 times, the last time with: RuntimeError: no such luck" in text
        assert attempts == [0, 1, 2, 2, 2]
        assert len(finished(out)) == 2
        command(config, out, *SHARDS)
    else:
        command(config, out, *SHARDS)
        assert attempts[:5] == [0, 1, 2, 2, 3]
    assert_same(whole, out)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--multi-gpu",), "with --cuda for GPUs"),
        (("--async-write",), "one computes while another writes"),
        (("--write-threads", "2"), "one computes while another writes"),
        (("--workers", "2", "--device", "cuda:1"), "every worker sees one GPU, which is its first"),
        (("--workers", "2", "--gpus-per-worker", "2"), "a worker computes on one GPU"),
        (("--workers", "200", "--gpus-per-worker", "0.5"), "are more than the"),
    ],
)
def test_flags(tmp_path, config, flags, expected):
    assert expected in refusal(config, tmp_path / "merged", *flags)


def test_help_leaves_out_what_is_refused():
    text = CliRunner().invoke(main, ["merge", "--help"]).output
    assert "--read-to-gpu" in text
    assert not any(f"--{name.replace('_', '-')}" in text for name in ONE_PROCESS_FLAGS)


@pytest.mark.parametrize("method", ["ace", "task_arithmetic"])
@pytest.mark.parametrize("key", ["dtype", "out_dtype"])
def test_a_result_beyond_float16(tmp_path, method, key):
    """mergekit-yaml would write Inf for `out_dtype`, and for its own methods."""
    paths = save_llamas(tmp_path)
    parameters = {"lambda": 1e8, **({"weight": 1} if method == "task_arithmetic" else {})}
    config = ace_config(paths, merge_method=method, parameters=parameters, **{key: "float16"})
    out = tmp_path / "merged"
    text = refusal(write_config(tmp_path / "merge.yml", config), out, *SHARDS)
    assert "came out too large for" in text
    assert "bfloat16" in text
    assert not list(out.glob("*.safetensors"))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--out-shard-size", "0"), "such as 5B"),
        (("--out-shard-size", "1.5GB"), "such as 5B"),
        (("--gpus-per-worker", "-1"), "--gpus-per-worker"),
        (("--workers", "0"), "--workers"),
        (("--resume", "--overwrite"), "--resume keeps what --overwrite drops"),
    ],
)
def test_values_of_flags(tmp_path, config, flags, expected):
    result = CliRunner().invoke(main, ["merge", str(config), str(tmp_path / "merged"), *flags])
    assert result.exit_code == 2, result.output
    assert flags[0] in result.output
    assert expected in result.output
    assert not (tmp_path / "merged").exists()


@pytest.mark.parametrize("size", ["12k", "12K", "012000"])
def test_sizes_of_shards(tmp_path, config, whole, size):
    command(config, tmp_path / "merged", "--out-shard-size", size)
    assert_same(whole, tmp_path / "merged")


@pytest.mark.parametrize("workers", [1, 2])
def test_nan_that_a_method_of_mergekit_lets_through(tmp_path, workers):
    paths = save_llamas(tmp_path)
    file = max(Path(paths[1]).glob("*.safetensors"))
    tensors = load_file(file)
    name = next(iter(tensors))
    save_file({**tensors, name: tensors[name] * float("nan")}, file, {"format": "pt"})
    config = write_config(tmp_path / "merge.yml", linear(paths))
    text = refusal(config, tmp_path / "merged", *SHARDS, "--workers", workers)
    assert f"tensor {name} came out with NaN or Inf" in text


def test_the_remedy_for_a_nan(tmp_path, config):
    """What is printed works: --resume does not, once an input had to be changed."""
    out = tmp_path / "merged"
    path = max(Path(tmp_path, "expert1").glob("*.safetensors"))
    good = load_file(path)
    name = next(name for name, tensor in good.items() if tensor.ndim == 2)
    bad = {**good, name: good[name].clone()}
    bad[name][0, 0] = float("nan")
    save_file(bad, path, {"format": "pt"})
    text = refusal(config, out, *SHARDS)
    assert name in text
    assert "tried again" not in text
    assert "give --overwrite instead, which begins anew" in text
    save_file(good, path, {"format": "pt"})
    text = refusal(config, out, *SHARDS)
    assert "changed since it was begun: " in text
    assert "--overwrite to begin anew" in text.replace("\n", " ")
    command(config, out, *SHARDS, "--overwrite")
    command(config, tmp_path / "again" / "merged", *SHARDS)
    assert_same(tmp_path / "again" / "merged", out)
