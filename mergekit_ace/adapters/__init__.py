# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters as task vectors of low rank: read, merged and written without a base's weights."""
