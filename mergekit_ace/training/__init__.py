# SPDX-License-Identifier: Apache-2.0
"""Learning the coefficients of StatsMerging: from a `train.yml` to `coefficients.safetensors`."""
