# SPDX-License-Identifier: Apache-2.0
"""`score`: what a merge keeps of its experts, and what it forgets."""
