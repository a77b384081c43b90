# SPDX-License-Identifier: Apache-2.0
"""`accelerate launch -m mergekit_ace.train`, the older spelling of `-m mergekit_ace.cli train`."""

import sys

from mergekit_ace.cli import main

if __name__ == "__main__":
    print("mergekit_ace.train is now mergekit_ace.cli train", file=sys.stderr)
    main(["train", *sys.argv[1:]])
