# SPDX-License-Identifier: Apache-2.0
"""Reports have the lines of every shard once."""

from __future__ import annotations

from mergekit_ace.merging.output import append_lines, drop_lines, report_sizes


def test_reports(tmp_path):
    path = str(tmp_path / "report.jsonl")
    assert report_sizes([path]) == {path: 0}
    drop_lines(path, 0, {"a"})  # there is none
    append_lines({path: '{"tensor": "a"}\n'})
    sizes = report_sizes([path])
    append_lines({path: '{"tensor": "a"}\n{"tensor": "b"}\n{"tens'})
    drop_lines(path, sizes[path], {"a"})
    assert (tmp_path / "report.jsonl").read_text() == '{"tensor": "a"}\n{"tensor": "b"}\n'
