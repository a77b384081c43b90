# SPDX-License-Identifier: Apache-2.0
"""`calibrate`: the linear layers of a merge solved anew on samples, one decoder layer at a time."""
