"""Build a kernel for Hugging Face's `kernels` package, in Python and Triton alone: gated MLPs, rational activations, rotations.

Usage: python hub/build.py OUT. It writes

    OUT/README.md
    OUT/build/torch-cpu/    __init__.py, layers.py, metadata.json, the rooms of fastkron_py that they import
    OUT/build/torch-cuda/   the same

Code in Python runs with every version of torch, so these two variants are all. `kernels` asks of a variant that it be
found outside of Python's path, and that several versions of it work in one process. So every import is made relative,
and the operators' namespace is the variant's identifier, which ends with a digest of the sources.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
PACKAGE: Final = HERE.parent / "fastkron_py"
NAME: Final = "fastkron"
VERSION: Final = 0  # of the interface; `kernels` reserves 0 for interfaces that may still change
ROOMS: Final = ("gated", "kron", "rational", "runtime", "tiling")
LEFT_OUT: Final = PACKAGE / "kron" / "operators"  # which nothing here imports
LAYERS: Final = ("gated.py", "modules.py", "rational*.py", "rational_table.json")
BACKENDS: Final[dict[str, dict[str, Any]]] = {"cpu": {"type": "cpu"}, "cuda": {"type": "cuda", "archs": ["8.0+PTX"]}}
NAMESPACE: Final = 'NAMESPACE: Final = "fastkron"'  # of runtime/operator.py

# Older versions of `kernels` look for a package of the kernel's name in the variant.
COMPATIBLE: Final = '''"""The kernel, for older versions of `kernels`."""

import importlib.util
import sys
from pathlib import Path

if "{id}" not in sys.modules:
    spec = importlib.util.spec_from_file_location("{id}", Path(__file__).parents[1] / "__init__.py")
    sys.modules["{id}"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["{id}"])
globals().update({{name: getattr(sys.modules["{id}"], name) for name in sys.modules["{id}"].__all__}})
'''


def sources() -> dict[str, bytes]:
    """The files of a variant by their path in it, with relative imports."""
    found = {"__init__.py": HERE / "kernel.py", "layers.py": HERE / "layers.py", "testing.py": PACKAGE / "testing.py"}
    for room in ROOMS:
        files = [*(PACKAGE / room).rglob("*.py"), *(PACKAGE / room).rglob("*.json")]
        found |= {path.relative_to(PACKAGE).as_posix(): path for path in files if LEFT_OUT not in path.parents}
    found |= {path.relative_to(PACKAGE).as_posix(): path for pattern in LAYERS for path in (PACKAGE / "nn").glob(pattern)}
    texts = {name: relative(path.read_text(), name) for name, path in sorted(found.items())}
    return {name: text.encode() for name, text in texts.items()} | {"nn/__init__.py": b'"""Layers."""\n'}


def relative(text: str, name: str) -> str:
    """The text of a file at this path, with imports from fastkron_py relative to it.

    Raises:
        ValueError: fastkron_py is imported in another form than ``from fastkron_py.room import name``.
    """
    dots = "." * (name.count("/") + 1)
    text = re.sub(r"^(\s*)from fastkron_py\.", rf"\1from {dots}", text, flags=re.MULTILINE)
    left = re.search(r"^\s*(?:from|import) fastkron_py\b.*", text, flags=re.MULTILINE)
    if left is not None:
        raise ValueError(f"{name}: expected 'from fastkron_py.room import name', got {left[0].strip()!r}")
    return text


def variant(backend: str, files: dict[str, bytes]) -> dict[str, bytes]:
    """All files of a variant: the sources with its namespace, the compatible package and the metadata."""
    unique = hashlib.sha256(json.dumps({name: hashlib.sha256(data).hexdigest() for name, data in files.items()}).encode()).hexdigest()[:10]
    identifier = f"_{NAME}_{backend}_{unique}"
    operator = files["runtime/operator.py"].decode()
    if operator.count(NAMESPACE) != 1:
        raise ValueError(f"runtime/operator.py: expected one line {NAMESPACE!r}, got {operator.count(NAMESPACE)}")
    files = files | {
        "runtime/operator.py": operator.replace(NAMESPACE, f'NAMESPACE: Final = "{identifier}"').encode(),
        f"{NAME}/__init__.py": COMPATIBLE.format(id=identifier).encode(),
    }
    metadata = {
        "name": NAME,
        "id": identifier,
        "version": VERSION,
        "license": "apache-2.0",
        "python-depends": [],
        "backend": BACKENDS[backend],
        "digest": {
            "algorithm": "sha256",
            "files": {name: base64.b64encode(hashlib.sha256(data).digest()).decode() for name, data in sorted(files.items())},
        },
    }
    return files | {"metadata.json": (json.dumps(metadata, indent=2) + "\n").encode()}


def build(out: Path) -> None:
    """Write the kernel's repository into a folder, in place of an earlier build."""
    files = sources()
    for backend in BACKENDS:
        folder = out / "build" / f"torch-{backend}"
        shutil.rmtree(folder, ignore_errors=True)
        for name, data in variant(backend, files).items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)
    shutil.copy(HERE / "README.md", out / "README.md")
    print(f"{out}: {', '.join(f'torch-{backend}' for backend in BACKENDS)}, {len(files)} files each")


if __name__ == "__main__":
    build(Path(sys.argv[1]))
