# SPDX-License-Identifier: Apache-2.0
"""`calibrate`: the linears of a merge solved anew on a few samples, one decoder layer at a time."""
