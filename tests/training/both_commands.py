# SPDX-License-Identifier: Apache-2.0
"""Train, then distil, in the same processes: TRAIN.yml OUT DISTILL.yml OUT."""

import sys

from mergekit_ace.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:3]], standalone_mode=False)
    main(["distill", *sys.argv[3:5]], standalone_mode=False)
