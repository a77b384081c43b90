# SPDX-License-Identifier: Apache-2.0
"""Pure functions on tensors. Nothing here imports mergekit or accelerate."""
