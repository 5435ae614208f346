"""torchvision, imported so that one without its compiled operators does no harm to timm."""

from __future__ import annotations

import importlib
import re
import sys
from typing import Final

import torch

_SCHEMAS: Final = {name: f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")}
_declared: list[torch.library.Library] = []  # a library's declarations end with it


def import_torchvision() -> None:
    """Import torchvision, which timm takes its image transforms from.

    A torchvision that was built for another torch, say for CUDA beside a torch for CPUs, cannot load its compiled operators, and
    then fails to describe two of them. Declared here, and left without an implementation, they let the rest of torchvision be
    imported; calling them still raises.

    Raises:
        ImportError: there is no torchvision.
    """
    for _ in range(len(_SCHEMAS) + 1):
        try:
            importlib.import_module("torchvision")
            return
        except RuntimeError as error:
            missing = re.search(r"operator torchvision::(\w+) does not exist", str(error))
            if missing is None or missing[1] not in _SCHEMAS:
                raise
        library = torch.library.Library("torchvision", "FRAGMENT")
        library.define(_SCHEMAS[missing[1]])
        _declared.append(library)
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]
