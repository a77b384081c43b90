# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch -m mergekit_ace.train train.yml coefficients/`."""

from mergekit_ace.cli import train

if __name__ == "__main__":
    train()
