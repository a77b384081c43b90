# SPDX-License-Identifier: Apache-2.0
"""Published merge methods that ACE-Merging is compared with, by what they work on."""
