"""Imports torchvision, also one that was built for another torch: timm and transformers import it, and no test calls its operators."""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from typing import Final

import torch

_SCHEMAS: Final = {name: f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor" for name in ("nms", "qnms")}
_declared: list[torch.library.Library] = []  # a library's declarations end with it


def import_torchvision() -> None:
    """Import torchvision if it is installed, before timm or transformers do.

    A torchvision for another build of torch cannot load its compiled operators. Its import then fails where it registers shape
    functions for two of them. Declaring these two lets the import pass; calling them still raises.
    """
    if importlib.util.find_spec("torchvision") is None:
        return
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
