# SPDX-License-Identifier: Apache-2.0
"""`mergekit-ace merge`: a merge in shards, restartable, on one machine or on many."""
