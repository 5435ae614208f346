"""Another revision of this library beside this one, call by call in turn on one device.

    git archive REVISION fastkron_py distributed integrations | tar x -C FOLDER
    python benchmarks/beside.py FOLDER gated kron_float64 "kron*2" "eager:layer" --seconds 250 --out beside.jsonl

A name may be followed by ``:LABEL``, for the cases with this in their label, and by ``*N``, for every N-th of them. Two processes, one for
each revision, hold a case and make its calls when they are told to; kernels are compiled before, in several processes. Cases are those of
this checkout's benchmarks, or of FOLDER's own, if it has a folder ``benchmarks``. Printed are medians of five, eager and in CUDA graphs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import json
import math
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve()
MODULES: Final = tuple(
    f"benchmarks.{name}"
    for name in (
        *("adapters.batched", "adapters.lokr", "eager.calls", "gated.layers", "kan.layers", "kron.hadamard", "kron.identity"),
        *("kron.products", "kron.quantize", "kron.rotate", "kron.solve", "rational.activations", "rational.layers"),
    )
)
ROUNDS: Final = 5
SECONDS_OF_A_TURN: Final = 4e-3
COMPILING: Final = 0.5  # of the time, at most


def _registered() -> dict[str, Any]:
    for name in MODULES:
        with contextlib.suppress(ImportError):  # of a benchmark that the other revision has not
            importlib.import_module(name)
    from benchmarks.registry import registered

    return registered()


def _cases(asked: str) -> tuple[Any, list[Any], Any]:
    """The benchmark, its cases that are asked for, and the device."""
    import torch

    from benchmarks.registry import Draw

    asked, _, every = asked.partition("*")
    name, _, label = asked.partition(":")
    benchmark, device = _registered()[name], torch.device("cuda" if torch.cuda.is_available() else "cpu")
    cases = benchmark.draw(Draw(seed=1, count=16, seeds=3), device) if benchmark.draw else benchmark.cases
    return benchmark, [case for case in cases if label in case.label][:: int(every or 1)], device


def _calls(benchmark: Any, case: Any, device: Any) -> dict[str, Any]:
    """This library's calls of a case, each made once."""
    problem, found = benchmark.inputs(case.parameters, device), {}
    for contender in benchmark.contenders:
        if contender.is_ours and contender.obstacle(device) is None and (contender.labels is None or case.label in contender.labels):
            call = contender.prepare(problem)
            call()
            found[contender.name] = call
    return found


def _graph(call: Any) -> Any:
    """The replay of a CUDA graph of the call; None where it cannot be captured."""
    import torch

    from benchmarks.timing import graphed

    if not torch.cuda.is_available():
        return None
    try:
        return graphed(call)
    except RuntimeError:
        torch.cuda.synchronize()
        return None


def _seconds(function: Any, count: int) -> float:
    import torch

    wait = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    function()
    wait()
    start = time.perf_counter()
    for _ in range(count):
        function()
    wait()
    return (time.perf_counter() - start) / count


def _compile(share: int, of: int, names: list[str]) -> None:
    """Make each of-th call once, from a share on."""
    known = [name for name in names if name.partition("*")[0].partition(":")[0] in _registered()]
    work = [(benchmark, case, device) for benchmark, cases, device in map(_cases, known) for case in cases]
    for benchmark, case, device in work[share::of]:
        with contextlib.suppress(Exception):  # it says why when it is timed
            _calls(benchmark, case, device)


def _serve() -> None:
    """Answer each line of JSON by one: how many cases there are, what a case has, seconds of a call."""
    import torch

    out, held = os.fdopen(os.dup(1), "w"), dict[str, Any]()
    os.dup2(2, 1)
    torch.set_grad_enabled(False)
    for line in sys.stdin:
        asked = json.loads(line)
        answer: Any
        if asked["do"] == "count":
            is_known = asked["name"].partition("*")[0].partition(":")[0] in _registered()
            answer = len(_cases(asked["name"])[1]) if is_known else None
        elif asked["do"] == "open":
            held.clear()
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
            benchmark, cases, device = _cases(asked["name"])
            try:
                for name, call in _calls(benchmark, cases[asked["number"]], device).items():
                    held[f"{name}, eager"], graph = call, _graph(call)
                    held |= {} if graph is None else {f"{name}, graph": graph}
                answer = {"label": cases[asked["number"]].label, "calls": {name: _seconds(call, 2) for name, call in held.items()}}
            except Exception as error:
                answer = {"label": cases[asked["number"]].label, "calls": {}, "error": repr(error)[:200]}
        else:
            answer = _seconds(held[asked["call"]], asked["count"])
        print(json.dumps(answer), file=out, flush=True)


def _start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    paths = [str(folder), str(HERE.parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-P", str(HERE), *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=folder)


def _ask(process: subprocess.Popen[str], **asked: Any) -> Any:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(asked) + "\n")
    process.stdin.flush()
    return json.loads(process.stdout.readline())


def compare(folder: Path, names: list[str], seconds: float, processes: int, out: Path) -> dict[str, list[float]]:
    """Time the cases, print a line for each call, and return ratios of the times, new over old, by name and kind of call."""
    end, sides = time.monotonic() + seconds, {"old": folder.resolve(), "new": HERE.parents[1]}
    compiling = [_start(side, "--compile", str(i), str(processes), *names) for side in sides.values() for i in range(processes)]
    for process in compiling:
        try:
            process.communicate(timeout=max(1.0, end - seconds * (1 - COMPILING) - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
    held, ratios = {name: _start(side, "--serve") for name, side in sides.items()}, dict[str, list[float]]()
    with out.open("w") as log:
        for name in names:
            counts = {side: _ask(process, do="count", name=name) for side, process in held.items()}
            if missing := [side for side, count in counts.items() if count is None]:
                print(f"{name}: not a benchmark that the {missing[0]} revision can import; give its folder a folder benchmarks")
                continue
            for number in range(min(counts.values())):
                if time.monotonic() > end:
                    break
                opened = {side: _ask(process, do="open", name=name, number=number) for side, process in held.items()}
                shared = {call: t for call, t in opened["new"]["calls"].items() if call in opened["old"]["calls"]}
                times: dict[tuple[str, str], list[float]] = {}
                for _ in range(ROUNDS):
                    for call, t in shared.items():
                        for side, process in held.items():
                            count = max(1, min(50, int(SECONDS_OF_A_TURN / max(t, 1e-6))))
                            times.setdefault((call, side), []).append(_ask(process, do="time", call=call, count=count))
                medians = {call: {side: statistics.median(times[call, side]) for side in held} for call in shared}
                print(
                    json.dumps({"name": name, "label": opened["new"]["label"], "opened": opened, "medians": medians}), file=log, flush=True
                )
                for call, of in medians.items():
                    ratios.setdefault(f"{name}, {call}", []).append(of["new"] / of["old"])
                    line = f"{1e6 * of['old']:10.1f} {1e6 * of['new']:10.1f} us  {of['new'] / of['old']:.2f}"
                    print(f"{name.partition(':')[0]} {opened['new']['label'][:50]:50} {call[:30]:30} {line}", flush=True)
    for process in held.values():
        process.communicate()
    for name, of in ratios.items():
        mean = math.exp(statistics.fmean(map(math.log, of)))
        print(f"{name}: {len(of)} cases, new over old {mean:.3f} in geometric mean, {min(of):.2f} to {max(of):.2f}")
    return ratios


def main() -> None:
    """Run as a script."""
    if sys.argv[1:2] == ["--serve"]:
        return _serve()
    if sys.argv[1:2] == ["--compile"]:
        return _compile(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the other revision's fastkron_py, distributed and integrations")
    parser.add_argument("names", nargs="+", metavar="NAME[:LABEL][*N]", help="of benchmarks")
    parser.add_argument("--seconds", type=float, default=300.0, help="after which no case is begun; at most half go to compiling")
    parser.add_argument("--compile", type=int, default=max(1, (os.cpu_count() or 2) // 2), metavar="N", help="processes of each revision")
    parser.add_argument("--out", type=Path, default=Path("beside.jsonl"), help="a line of JSON for each case")
    options = parser.parse_args()
    compare(options.folder, options.names, options.seconds, options.compile, options.out)
    return None


if __name__ == "__main__":
    main()
