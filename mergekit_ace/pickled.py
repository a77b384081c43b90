# SPDX-License-Identifier: Apache-2.0
"""Old `.bin` checkpoints, which are pickles: opened by mergekit's loader only.

Not by the one of `--lazy-unpickle`, though it reads less: that one would run a TorchScript archive.
"""

from __future__ import annotations

import os

from mergekit.io.loader import DumbPytorchLoader
from torch import Tensor

from mergekit_ace.headers import DamagedFileError


def read_pickle(path: str | os.PathLike, device: str = "meta") -> dict[str, Tensor]:
    """Return the tensors of an old `.bin` file; on the meta device, their shapes and dtypes only.

    mergekit's loader opens it, which refuses a file that would execute something.

    Raises:
        DamagedFileError: the file is damaged, or holds more than tensors.
    """
    try:
        content = DumbPytorchLoader(os.fspath(path), device=device).tensors
        content = content.get("state_dict", content)
        return {name: value for name, value in content.items() if isinstance(value, Tensor)}
    except Exception as error:  # of many kinds; torch's advice is to trust the file
        raise DamagedFileError(
            f"{path} is damaged, or holds more than tensors, which is never executed here; "
            "download it again, or the model's safetensors files"
        ) from error
