# SPDX-License-Identifier: Apache-2.0
"""A worker tells of what keeps it from computing."""

from __future__ import annotations

import torch
from mergekit.options import MergeOptions

from mergekit_ace.files.saving import package_versions
from mergekit_ace.merging.job import MERGE_PACKAGES, MergeJob
from mergekit_ace.merging.worker import ShardWorker


def test_other_packages(tmp_path):
    """On a node of a cluster that was set up at another time."""
    versions = {**package_versions(*MERGE_PACKAGES), "torch": "0.1"}
    threads = torch.get_num_threads()
    folder = str(tmp_path)
    job = MergeJob({}, MergeOptions(), None, None, folder, folder, threads, versions)
    (failure,) = ShardWorker(job).run(3, ["model.norm.weight"])
    assert failure.shard == 3
    assert "MergeError: a worker has other packages" in failure.message
    assert "'torch': '0.1'" in failure.message
    assert not list(tmp_path.iterdir())
