# SPDX-License-Identifier: Apache-2.0
"""What can be known of a merge before it starts, from configs, tokenizers and headers."""
