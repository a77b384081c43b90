# SPDX-License-Identifier: Apache-2.0
"""Adapters to mergekit: each merge method unpacks its inputs, calls the algebra and wraps."""
