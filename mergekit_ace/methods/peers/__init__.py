# SPDX-License-Identifier: Apache-2.0
"""Data-free merge methods that ACE-Merging is compared with, a file each, named after it."""
