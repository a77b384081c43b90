# SPDX-License-Identifier: Apache-2.0
"""Merging coefficients: the file, the network that predicts them, the statistics that it reads."""
