# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch -m mergekit_ace.train train.yml coefficients/`."""

import sys

from mergekit_ace.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]])
