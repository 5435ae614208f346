"""Run another library's own tests with `use_fastkron` off and on, and compare test by test.

Usage: python tests/integrations/upstream.py gpytorch|peft|lycoris PATH ... , each a folder or file of tests of the library's source
distribution or repository (wheels bring none) whose version is the installed one's. Exit code 1 if any test ends differently.
Of PEFT's tests those of LoKr are run, by name.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


class Recorder:
    """A pytest plugin: turns the integration on where it is asked to, and notes how each test ended."""

    def __init__(self, turn_on: Callable[[Recorder], None] | None) -> None:
        self.turn_on = turn_on
        self.outcomes: dict[str, str] = {}
        self.multiplies = 0

    def pytest_sessionstart(self) -> None:
        if self.turn_on is not None:
            self.turn_on(self)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            self.outcomes[report.nodeid] = report.outcome

    def count(self, kind: Any, name: str) -> None:
        """Count the calls of a method."""
        method = getattr(kind, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            self.multiplies += 1
            return method(*args, **kwargs)

        setattr(kind, name, counted)


def in_gpytorch(recorder: Recorder) -> None:
    from fastkron_py.integrations.gpytorch import use_fastkron
    from fastkron_py.integrations.gpytorch.operators import FastProducts

    recorder.count(FastProducts, "_multiply")
    use_fastkron()


def in_peft(recorder: Recorder) -> None:
    """In every model that PEFT adds adapters to."""
    from peft.tuners.tuners_utils import BaseTuner

    from fastkron_py.adapters.adapter import Adapter
    from fastkron_py.integrations.peft import use_fastkron

    recorder.count(Adapter, "product")
    after(BaseTuner, "inject_adapter", lambda tuner, model, *args, **kwargs: use_fastkron(model))


def in_lycoris(recorder: Recorder) -> None:
    """In every module of LoKr, from the beginning."""
    from lycoris.modules.lokr import LokrModule

    from fastkron_py.adapters.adapter import Adapter
    from fastkron_py.integrations.lycoris import use_fastkron

    recorder.count(Adapter, "product")
    after(LokrModule, "__init__", lambda module, *args, **kwargs: use_fastkron(module))


def after(kind: Any, name: str, change: Callable[..., object]) -> None:
    """Let a method end with a change; one that has nothing to change says so."""
    method = getattr(kind, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        found = method(*args, **kwargs)
        try:
            change(*args, **kwargs)
        except ValueError as error:
            if "that can be replaced" not in str(error):
                raise
        return found

    setattr(kind, name, changed)


SUITES: dict[str, Callable[[Recorder], None]] = {"gpytorch": in_gpytorch, "peft": in_peft, "lycoris": in_lycoris}


def import_what_they_import(suite: str) -> None:
    """Torchvision, also where it was built for another torch."""
    if suite != "gpytorch":
        sys.path.insert(0, str(ROOT / "tests"))
        from torchvision_import import import_torchvision

        import_torchvision()
        sys.path.remove(str(ROOT / "tests"))


def run_one(suite: str, mode: str, path: str, out: str) -> None:
    """One suite in this process; what happened goes to a JSON file."""
    import_what_they_import(suite)
    recorder = Recorder(SUITES[suite] if mode == "on" else None)
    # The suites' own options ask for plugins.
    options = ["-q", "-p", "no:cacheprovider", "-o", "addopts=", "--no-header", "--tb=short", "--continue-on-collection-errors"]
    pytest.main([*options, *(["-k", "lokr"] if suite == "peft" else []), path], plugins=[recorder])
    Path(out).write_text(json.dumps({"outcomes": recorder.outcomes, "multiplies": recorder.multiplies}))


def compare(suite: str, path: Path) -> bool:
    """Both runs of one suite, side by side in two processes; whether every test ended alike."""
    with tempfile.TemporaryDirectory() as work:
        outs = {mode: Path(work) / f"{mode}.json" for mode in ("off", "on")}
        # The suite's own folder is the working directory, so that what lies beside it is not imported in place of what is installed.
        # Without a network each test that wants a file from one would wait for it.
        env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path[1:])]), "HF_HUB_OFFLINE": "1"}
        children = {
            mode: subprocess.Popen(
                [sys.executable, __file__, "--one", suite, mode, str(path), str(out)],
                cwd=path if path.is_dir() else path.parent,
                env=env,
                stdout=(Path(work) / f"{mode}.txt").open("w"),
            )
            for mode, out in outs.items()
        }
        for child in children.values():
            child.wait()
        found = {mode: json.loads(out.read_text()) for mode, out in outs.items()}
        for mode in found:
            if set(found[mode]["outcomes"].values()) - {"passed", "skipped"} or not found[mode]["outcomes"]:
                print((Path(work) / f"{mode}.txt").read_text()[-6000:])
    for mode, result in found.items():
        print(f"{path} {mode}: {dict(collections.Counter(result['outcomes'].values()))}, {result['multiplies']} products by fastkron_py")
    off, on = (found[mode]["outcomes"] for mode in ("off", "on"))
    different = [name for name in off.keys() | on.keys() if off.get(name) != on.get(name)]
    for name in sorted(different)[:50]:
        print(f"  {name}: off {off.get(name)}, on {on.get(name)}")
    return bool(off) and not different


if __name__ == "__main__":
    if sys.argv[1:2] == ["--one"]:
        run_one(*sys.argv[2:])
    else:
        results = [compare(sys.argv[1], Path(path).resolve()) for path in sys.argv[2:]]
        sys.exit(0 if all(results) else 1)
