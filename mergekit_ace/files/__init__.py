# SPDX-License-Identifier: Apache-2.0
"""Files that this package reads and writes: checkpoints, coefficients, statistics."""
