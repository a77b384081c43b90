# SPDX-License-Identifier: Apache-2.0
"""See before and after a merge."""
