# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace methods`."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

import mergekit_ace
from mergekit_ace.cli import main
from mergekit_ace.plugin import our_methods


def printed(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["methods", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("method", our_methods(), ids=lambda method: method.spec.name)
def test_what_is_said_of_a_method(method):
    head = f"{method.spec.name}: {method.spec.pretty_name}, {method.spec.reference_url}"
    text = " ".join(printed(method.spec.name).split())
    assert head in text
    assert " ".join(method.summary.split()) in text
    for parameter in method.spec.parameters:
        assert f"{parameter.name}: " in text
        assert parameter.allowed in text
        assert " ".join(parameter.description.split()) in text
    assert method.layouts == () or "transposed" in method.layouts
    for citation in method.citations:
        assert " ".join(citation.split()) in text
    assert head in printed()


def test_one_method():
    text = printed("wudi")
    assert "solver: adam; one of adam, exact" in text
    assert "weight: 1.0; a number, 0 or greater; per expert" in printed("ace")
    assert "tsv_m" not in text
    result = CliRunner().invoke(main, ["methods", "acee"])
    assert result.exit_code == 1
    assert "no method 'acee' here; there are ace, ace_relative" in result.output


def test_the_reference_in_the_repository_is_what_is_printed():
    """Renew it by `mergekit-ace methods --markdown > mergekit_ace/methods/README.md`."""
    file = Path(mergekit_ace.__file__).parent / "methods" / "README.md"
    assert file.read_text(encoding="utf-8") == printed("--markdown")
