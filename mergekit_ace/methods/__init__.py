# SPDX-License-Identifier: Apache-2.0
"""Adapters to mergekit: each merge method unpacks its inputs, calls the algebra and wraps."""

# Our methods are registered once this is imported. If one of the modules here imported it first, it
# would be half done itself when its method is asked for.
import mergekit.merge_methods  # noqa: F401
