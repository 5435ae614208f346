"""Run gpytorch's and linear_operator's own test suites with `use_fastkron` off and on, and compare test by test.

Usage: python tests/integrations/upstream.py FOLDER ... , each a `test` folder of a source distribution (wheels bring no tests)
whose version is the installed one's. Exit code 1 if any test ends differently.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


class Recorder:
    """A pytest plugin: turns the integration on where it is asked to, and notes how each test ended."""

    def __init__(self, on: bool) -> None:
        self.on = on
        self.outcomes: dict[str, str] = {}
        self.multiplies = 0

    def pytest_sessionstart(self) -> None:
        if not self.on:
            return
        from fastkron_py.integrations.gpytorch import use_fastkron
        from fastkron_py.integrations.gpytorch.operators import FastProducts

        multiply = FastProducts._multiply

        def counted(*args: object) -> object:
            self.multiplies += 1
            return multiply(*args)  # type: ignore[arg-type]

        FastProducts._multiply = counted  # type: ignore[assignment, method-assign]
        use_fastkron()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome


def run_one(mode: str, folder: str, out: str) -> None:
    """One suite in this process; what happened goes to a JSON file."""
    recorder = Recorder(mode == "on")
    pytest.main(["-q", "-p", "no:cacheprovider", "--no-header", "--tb=short", folder], plugins=[recorder])
    Path(out).write_text(json.dumps({"outcomes": recorder.outcomes, "multiplies": recorder.multiplies}))


def compare(folder: str) -> bool:
    """Both runs of one suite, side by side in two processes; whether every test ended alike."""
    with tempfile.TemporaryDirectory() as work:
        outs = {mode: Path(work) / f"{mode}.json" for mode in ("off", "on")}
        # The suite's own folder is the working directory, so that what lies beside it is not imported in place of what is installed.
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])])}
        children = {
            mode: subprocess.Popen(
                [sys.executable, __file__, "--one", mode, folder, str(out)],
                cwd=folder,
                env=env,
                stdout=(Path(work) / f"{mode}.txt").open("w"),
            )
            for mode, out in outs.items()
        }
        for child in children.values():
            child.wait()
        found = {mode: json.loads(out.read_text()) for mode, out in outs.items()}
        for mode in found:
            if set(found[mode]["outcomes"].values()) - {"passed", "skipped"}:
                print((Path(work) / f"{mode}.txt").read_text()[-6000:])
    for mode, result in found.items():
        print(f"{folder} {mode}: {dict(collections.Counter(result['outcomes'].values()))}, {result['multiplies']} products by fastkron_py")
    off, on = (found[mode]["outcomes"] for mode in ("off", "on"))
    different = [name for name in off.keys() | on.keys() if off.get(name) != on.get(name)]
    for name in sorted(different)[:50]:
        print(f"  {name}: off {off.get(name)}, on {on.get(name)}")
    return not different


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_one(*sys.argv[2:])
    else:
        results = [compare(str(Path(folder).resolve())) for folder in sys.argv[1:]]
        sys.exit(0 if all(results) else 1)
