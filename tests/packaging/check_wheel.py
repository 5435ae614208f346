"""Build the distributions, install the wheel in an environment of its own, and run the tests against it.

Usage: python tests/packaging/check_wheel.py [pytest arguments]. The tests are copied away from the source
tree, so that only the installed package can be imported.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path) -> None:
    """Run a command, shown, without the caller's Python path; CalledProcessError if it fails."""
    print("+", *command, flush=True)
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    subprocess.run([str(c) for c in command], cwd=cwd, env=env | {"OMP_NUM_THREADS": "1"}, check=True)


def check_contents(wheel: Path, sdist: Path) -> None:
    """All subpackages lie inside the package, in both distributions; the sdist has what the README links to."""
    with zipfile.ZipFile(wheel) as archive:
        inside = archive.namelist()
    with tarfile.open(sdist) as packed_archive:
        packed = {name.partition("/")[2] for name in packed_archive.getnames()}
    modules = {p.relative_to(ROOT).as_posix() for pattern in ("*.py", "*.json") for p in (ROOT / "fastkron_py").rglob(pattern)}
    modules |= {
        f"fastkron_py/{p.relative_to(ROOT).as_posix()}" for room in ("distributed", "integrations") for p in (ROOT / room).rglob("*.py")
    }
    for what, names in (("wheel", set(inside)), ("sdist", packed)):
        missing = modules | {"fastkron_py/py.typed"}
        missing -= names
        if missing:
            raise SystemExit(f"missing from the {what}: {sorted(missing)}")
    linked = set(re.findall(r"\]\((?!https?:|#)([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8")))
    if linked - packed:
        raise SystemExit(f"linked by the README, and missing from the sdist: {sorted(linked - packed)}")
    top = {name.partition("/")[0] for name in inside}
    if top != {"fastkron_py", wheel.name.split("-py3")[0] + ".dist-info"}:
        raise SystemExit(f"beside the package in the wheel: {sorted(top)}")


def main(pytest_args: list[str]) -> None:
    """Build, install and test in a temporary directory."""
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        run(sys.executable, "-m", "build", "--outdir", work / "dist", ROOT, cwd=work)
        (wheel,), (sdist,) = (work / "dist").glob("*.whl"), (work / "dist").glob("*.tar.gz")
        check_contents(wheel, sdist)

        venv.create(work / "venv", with_pip=True)
        python = work / "venv" / "bin" / "python"
        pip = (python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "-c", ROOT / "constraints.txt")
        run(*pip, "torch", cwd=work)
        run(*pip, wheel, cwd=work)
        run(python, "-m", "fastkron_py", "info", cwd=work)
        run(*pip, f"{wheel}[test]", cwd=work)

        shutil.copytree(ROOT / "tests", work / "tests", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copy(ROOT / "pyproject.toml", work)
        run(python, "-m", "pytest", "-n", "auto", "-m", "not gpu", "-p", "no:cacheprovider", *pytest_args, cwd=work)


if __name__ == "__main__":
    main(sys.argv[1:])
