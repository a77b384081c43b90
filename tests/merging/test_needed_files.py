# SPDX-License-Identifier: Apache-2.0
"""What a merge reads is never replaced by its result."""

from __future__ import annotations

import shutil

import pytest
from checkpoints import ace_config, save_family, tiny_llama
from coefficient_files import make_file
from sharded import command, contents, linear, refusal, write_config


@pytest.fixture(scope="module")
def family(tmp_path_factory) -> list[str]:
    """A base and an expert."""
    return save_family(tiny_llama(), tmp_path_factory.mktemp("family"), experts=1)


def test_a_coefficient_file_in_the_output(tmp_path, family):
    out = tmp_path / "out"
    out.mkdir()
    file = out / "coefficients.safetensors"
    make_file(list(tiny_llama().state_dict()), family[1:2]).save(file)
    parameters = {"coefficients": str(file)}
    settings = ace_config(family[:2], merge_method="statsmerging", parameters=parameters)
    config = write_config(tmp_path / "merge.yml", settings)
    before = contents(out)
    for flags in ((), ("--overwrite",)):
        assert "coefficients.safetensors" in refusal(config, out, *flags)
        assert contents(out) == before
    text = refusal(config, out, "--overwrite")
    assert f"{file} is needed by the merge, and has a name that belongs" in text
    command(config, tmp_path / "elsewhere")


def test_a_model_whose_files_are_links_into_the_output(tmp_path, family):
    """A former result, under another name and beside another tokenizer."""
    out, linked = tmp_path / "out", tmp_path / "linked"
    shutil.copytree(family[1], out)
    linked.mkdir()
    for path in out.iterdir():
        (linked / path.name).symlink_to(path)
    config = write_config(tmp_path / "merge.yml", linear([family[0], str(linked)]))
    before = contents(out)
    text = refusal(config, out, "--overwrite")
    assert "is needed by the merge, and has a name that belongs" in text
    assert contents(out) == before


@pytest.mark.parametrize("name", ["merge_manifest.json", "README.md", ".merging/report.jsonl"])
def test_a_report_under_a_name_of_the_result(tmp_path, family, name):
    out = tmp_path / "out"
    (out / ".merging").mkdir(parents=True)
    parameters = {"report": str(out / name)}
    config = write_config(tmp_path / "m.yml", ace_config(family[:2], parameters=parameters))
    for flags in ((), ("--overwrite",)):
        assert f"{out / name} is needed by the merge" in refusal(config, out, *flags)
    assert not (out / name).exists()


def test_what_may_lie_in_the_output(tmp_path, family):
    """A report, and the config of the former merge: the lines of another merge stay."""
    out = tmp_path / "out"
    report = out / "report.jsonl"
    settings = ace_config(family, parameters={"report": str(report)})
    command(write_config(tmp_path / "merge.yml", settings), out)
    lines = report.read_text()
    command(out / "mergekit_config.yml", out, "--overwrite")
    again = report.read_text()
    assert again.startswith(lines)
    assert again.count("\n") == 2 * lines.count("\n")
