"""Products over all GPUs of this host: scaling, faults and both examples (`distributed`).

    python -m benchmarks.distributed [--ranks N] [--out DIR] [--quick] [--only scaling|faults|examples] [--device cpu]

does all of it and writes distributed_details.json and .png, each part as soon as it is done, so that a run that is stopped leaves those it
has; ``python -m benchmarks distributed`` takes the scaling alone, as a table.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.distributed.fault import HOWS
from benchmarks.environment import describe
from benchmarks.registry import Apart, Benchmark, Call, Case, Contender, register

ROOT = Path(__file__).resolve().parents[2]
ROLES = ("auto", "rows", "pairs", "halves", "columns")
SCALING_SECONDS = 100.0  # no product is begun later
JOB_SECONDS = 200.0
EXAMPLE_SECONDS = 90.0
FAULT_SECONDS = 60.0
CPU_RANKS = 2
TOLD = "fastkron_py: "  # begins a line about an exchange that a GPU does not finish
TAIL = 12  # lines of the survivor's stderr that are kept
LABELS = ("64^4 float32, 128 rows a rank", "64^4 float32, 128 rows", "128^4 float32, 8 rows a rank", "128^4 float32, 16 rows")
LABELS += ("128^3 float32, 128 rows", "64^4 float32, 32 rows a rank, with gradients")
LABELS += tuple(label.replace("float32", "bfloat16") for label in LABELS[:4])
EXAMPLES = {
    "multi_gpu_kron.py": {"cuda": ["--repeat", "5"], "cpu": ["--factors", "8", "8", "8", "--repeat", "2"]},
    "multi_gpu_gp.py": {"cuda": ["--stride", "4", "--steps", "20"], "cpu": ["--stride", "16", "--steps", "5"]},
}


def _environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | more


def _torchrun(ranks: int, *arguments: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--local-addr",
        "127.0.0.1",
        "--nproc-per-node",
        str(ranks),
        *arguments,
    ]


def _end(job: subprocess.Popen[Any]) -> None:
    """Have a launcher end its ranks, which would else keep their GPUs; whatever is left then is killed."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(job.pid, signal.SIGKILL)
            job.wait()


def _hidden_gpus(device: str) -> dict[str, str]:
    return {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}


@lru_cache(maxsize=4)
def scaling(ranks: int, device: str, quick: bool = False, seconds: float = SCALING_SECONDS, keep: Path | None = None) -> dict[str, Any]:
    """What ranks of one job measured of all products, which they write to a file after each; runs once in a process."""
    with tempfile.TemporaryDirectory() as folder:
        path = str((keep or Path(folder) / "found.json").absolute())
        Path(path).unlink(missing_ok=True)
        command = _torchrun(ranks, "-m", "benchmarks.distributed.ranks", path, str(seconds), "quick" if quick else "full")
        job = subprocess.Popen(command, cwd=ROOT, env=_environment(**_hidden_gpus(device)), start_new_session=True)
        try:
            ended = f"the job ended with {job.wait(JOB_SECONDS)}"
        except subprocess.TimeoutExpired:
            ended = f"the job took more than {JOB_SECONDS:g} s"
        finally:
            _end(job)
        if not Path(path).exists():
            raise RuntimeError(f"{ended}, before its first product was done")
        found: dict[str, Any] = json.loads(Path(path).read_text())
    if job.returncode:
        found["wrong"].append(f"{ended}, after the products that are listed")
    return found


def fault(how: str, device: str, ranks: int = 2) -> list[dict[str, Any]]:
    """The survivors of a line of ranks, whose last one is killed: their errors, or how they ended."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "benchmarks.distributed.fault", how, f"{folder}/killed"]
        size = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        children = []
        for rank in range(ranks):
            environment = _environment(RANK=str(rank), LOCAL_RANK=str(rank), **size, **_hidden_gpus(device))
            files = [Path(f"{folder}/{rank}.{kind}") for kind in ("out", "err")]
            with files[0].open("w") as out, files[1].open("w") as err:
                children.append((subprocess.Popen(command, cwd=ROOT, env=environment, stdout=out, stderr=err), files))
        ends, deadline, killed = dict[int, float](), time.time() + FAULT_SECONDS, Path(f"{folder}/killed")
        while len(ends) < ranks and time.time() < deadline:
            ends |= {rank: time.time() for rank, (child, _) in enumerate(children) if rank not in ends and child.poll() is not None}
            time.sleep(0.01)
        for child, _ in children:
            child.kill()
            child.wait()
        found = []
        for rank, (child, files) in enumerate(children[:-1]):
            after = ends[rank] - float(killed.read_text()) if rank in ends and killed.exists() else None
            late = None if rank in ends else f"had not ended after {FAULT_SECONDS:g} s"
            output, errors = (file.read_text() for file in files)
            found.append(survivor(how, child.returncode, after, output, errors, late) | {"rank": rank, "ranks": ranks})
    return found


def survivor(how: str, code: int, after: float | None, output: str, errors: str, late: str | None = None) -> dict[str, Any]:
    """What became of the rank whose peer was killed.

    Args:
        how: the kill.
        code: it ended with.
        after: seconds from the kill to its end.
        output: its stdout, a line of JSON if it met an error.
        errors: its stderr.
        late: the message where it did not end by itself.
    """
    errors = errors.replace(f"{ROOT}/", "")  # results are committed
    told = [line for line in errors.splitlines() if line.startswith(TOLD)]
    lines = [line for line in output.splitlines() if line.startswith("{")]
    tail = errors.rstrip().splitlines()[-TAIL:]
    if lines:
        error = json.loads(lines[-1])
    elif told:  # it waited for its GPU, until torch's watchdog or this benchmark ended it
        text = told[-1].removeprefix(TOLD)
        error = {"stage": text.partition(": has not been finished")[0], "message": late or text, "seconds": after}
    else:
        error = {"message": late or tail[-1:]}
    return {"how": how, "returncode": code, "ended_after": after, "told": told, "error": error, "errors": tail}


def examples(ranks: int, device: str) -> Iterator[dict[str, Any]]:
    """Both examples under torchrun and, where there is one, mpirun."""
    mpirun = shutil.which("mpirun") or shutil.which("mpiexec")
    for name, arguments in EXAMPLES.items():
        own = [str(ROOT / "examples" / name), *arguments[device]]
        yield _example(name, "torchrun", _torchrun(ranks, *own), device)
        if mpirun:
            yield _example(name, "mpirun", [mpirun, "-n", str(ranks), sys.executable, *own], device)


def _example(name: str, launcher: str, command: Sequence[str], device: str) -> dict[str, Any]:
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        environment, pipe = _environment(**_hidden_gpus(device)), subprocess.PIPE
        job = subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=pipe, text=True, start_new_session=True)
        try:
            output, errors = job.communicate(timeout=EXAMPLE_SECONDS)
            code, text = job.returncode, errors if job.returncode else output
        except subprocess.TimeoutExpired:
            code, text = None, f"did not end within {EXAMPLE_SECONDS:g} s"
        finally:
            _end(job)
    seconds = time.perf_counter() - start
    return {"example": name, "launcher": launcher, "returncode": code, "seconds": seconds, "tail": text.strip().splitlines()[-6:]}


def show(found: dict[str, Any]) -> list[str]:
    """Everything in lines, the products as a table."""
    lines = []
    products = found.get("scaling", {}).get("products", [])
    if products:
        names = " ".join(f"{name:>8}" for name in ("ms", "begun", "TFLOP/s"))
        lines.append(f"{'product':48} {'grid':6} {'how':18} {names} {'eff.':>5} {'sent GB':>8} {'hidden':>6}")
    for product in products:
        lines.append(f"{product['name']:48} alone  {'':18} {product['alone'] * 1e3:8.3f}")
        for g in product["grids"]:
            how = f"{g['stages']}".replace(" ", "") + f" /{g['chunks']}" + _sending(g)
            hidden = f"{g['hidden']:6.0%}" if "hidden" in g else ""
            lines.append(
                f"{'':48} {g['grid']:6} {how:18} {g['seconds'] * 1e3:8.3f}"
                f" {g['begun'] * 1e3:8.3f} {g['flops'] / 1e12:8.1f}"
                f" {g['efficiency']:5.0%} {g['bytes'] / 1e9:8.2f} {hidden}"
            )
            if len(g["also"]) > 1:
                each = [f"{a['stages']} /{a['chunks']}{_sending(a)} {a['seconds'] * 1e3:.2f} ({a['begun'] * 1e3:.2f})" for a in g["also"]]
                lines.append(f"{'':56}{'; '.join(each)}")
            if "exchanges" in g:
                lines.append(f"{'':56}exchanges alone {g['exchanges'] * 1e3:.3f}, multiplies alone {g['multiplies'] * 1e3:.3f}")
    if products:
        lines.append(f"agreement {found['scaling']['agree'] * 1e6:.1f} us; large product {found['scaling'].get('large')}")
        lines += [f"WRONG: {text}" for text in found["scaling"]["wrong"]]
        lines.append(f"left out: {found['scaling']['left_out']}; {found['scaling'].get('seconds', JOB_SECONDS):.0f} s")
    for f in found.get("faults", []):
        lines += _fault_lines(f)
    for e in found.get("examples", []):
        lines.append(f"{e['example']} under {e['launcher']}: code {e['returncode']}, {e['seconds']:.0f} s")
        lines += [f"    {line}" for line in e["tail"]]
    return lines


def _fault_lines(f: dict[str, Any]) -> list[str]:
    after = "" if f.get("ended_after") is None else f", {f['ended_after']:.2f} s after the kill"
    error = f.get("error", {})
    who = f" {f['rank']} of {f['ranks']}" if "rank" in f else ""
    lines = [f"killed peer, survivor{who} {f['how']}: code {f.get('returncode')}{after}; stage: {error.get('stage')}"]
    if error.get("message") and not f.get("told"):
        lines.append(f"    {error['message']}")
    return lines + [f"    {line}" for line in [*f.get("told", []), *(e for e in f.get("errors", []) if e not in f["told"])]]


def _sending(way: dict[str, Any]) -> str:
    return " direct" if way["direct"] else ""


def draw(found: dict[str, Any], path: Path) -> None:
    """Efficiency of each grid, product by product."""
    from matplotlib import pyplot

    from benchmarks.plots import COLOURS, INK, STYLE

    products = found["scaling"]["products"]
    grids = [g["grid"] for g in products[0]["grids"]]
    with pyplot.rc_context(STYLE):
        figure, axes = pyplot.subplots(figsize=(7.4, 0.5 + 0.62 * len(products)), layout="constrained")
        for j, name in enumerate(grids):
            values = [next((g["efficiency"] for g in p["grids"] if g["grid"] == name), 0.0) for p in products]
            places = [i - 0.4 + 0.8 * (j + 0.5) / len(grids) for i in range(len(products))]
            axes.barh(places, values, 0.72 / len(grids), color=COLOURS[j % len(COLOURS)], label=name)
        axes.set_yticks(range(len(products)), [p["name"] for p in products], fontsize=8)
        axes.invert_yaxis()
        axes.axvline(1.0, color=INK, linewidth=0.8, linestyle=":")
        axes.set_xlabel(f"share of {found['ranks']} times one {found['environment']['device']}'s speed")
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(frameon=False, fontsize=8, loc="outside lower center", ncols=len(grids))
        figure.savefig(path, dpi=130, transparent=True)
        pyplot.close(figure)


def _ranks(device: torch.device) -> int:
    return torch.cuda.device_count() if device.type == "cuda" else CPU_RANKS


def _apart(parameters: dict[str, Any], device: torch.device) -> Mapping[str, Apart]:
    """A case's figures out of the one job that measures all."""
    found = scaling(_ranks(device), device.type)
    product = next((p for p in found["products"] if p["name"] == parameters["name"]), None)
    if product is None:
        raise RuntimeError("not measured: no time was left, or another device's product")
    ranks = found["ranks"]
    names = dict(zip(ROLES, ("auto", *[f"{a} x {b}" for a, b in ((ranks, 1), (ranks // 2, 2), (2, ranks // 2), (1, ranks))]), strict=True))
    grids = {g["grid"]: g for g in product["grids"]}
    return {role: Apart(grids[name]["error"], [grids[name]["seconds"]] * 2) for role, name in names.items()}


def _elsewhere(_: Any) -> Call:
    raise RuntimeError("runs in a job of its own")


def _obstacle(device: torch.device) -> str | None:
    return None if _ranks(device) % 2 == 0 and _ranks(device) else "needs an even number of GPUs"


def _case(name: str) -> Case:
    dtype = name.split()[1].rstrip(",")
    return Case(name, {"name": name, "dtype": dtype}, dtype, 2e-6 if dtype == "float32" else 2e-2, quick=name in LABELS[:2])


register(
    Benchmark(
        name="distributed",
        description="Products over all GPUs of this host, on grids of n x 1, n/2 x 2, 2 x n/2 and 1 x n ranks.",
        device="cuda",
        cases=[_case(name) for name in LABELS],
        contenders=[Contender(role, _elsewhere, obstacle=_obstacle, is_ours=True) for role in ROLES],
        inputs=lambda parameters, device: None,
        check=lambda problem, result: 0.0,
        baseline="rows",
        apart=_apart,
        notes=("One job measures all; python -m benchmarks.distributed shows efficiency, bytes and hidden time, too.",),
    )
)


def main(arguments: list[str] | None = None) -> int:
    """Everything in one command; returns 1 where something failed."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.distributed", description=__doc__)
    parser.add_argument("--ranks", type=int, help="all GPUs")
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks"))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", choices=("scaling", "faults", "examples"), action="append")
    parser.add_argument("--seconds", type=float, default=SCALING_SECONDS, help="after which no product is begun")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args(arguments)
    ranks = options.ranks or _ranks(torch.device(options.device))
    parts = options.only or ["scaling", "faults", "examples"]
    found: dict[str, Any] = {"ranks": ranks, "environment": describe(torch.device(options.device))}
    if options.device == "cuda":
        torch.cuda.empty_cache()  # memory is the ranks'
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "distributed_details.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that jobs under way are ended, too
    failed = False
    if "scaling" in parts:
        try:
            keep = options.out / "distributed_scaling.json"
            found["scaling"] = scaling(ranks, options.device, options.quick, options.seconds, keep)
            failed |= bool(found["scaling"]["wrong"])
            _tell(found, {"scaling": found["scaling"]}, path)
        except RuntimeError as error:
            failed = True
            print(f"scaling: {error}", flush=True)
    for part, results in (
        ("faults", (f for how in HOWS for f in fault(how, options.device, ranks))),
        ("examples", examples(ranks, options.device)),
    ):
        for result in results if part in parts else ():
            found.setdefault(part, []).append(result)
            failed |= part == "examples" and result["returncode"] != 0
            _tell(found, {part: [result]}, path)
    return int(failed)


def _tell(found: dict[str, Any], new: dict[str, Any], path: Path) -> None:
    """Write all that was found, and show the new part."""
    path.write_text(json.dumps(found, indent=1) + "\n")
    if new.get("scaling", {}).get("products"):
        draw(found, path.with_suffix(".png"))
    print("\n".join(show(new)), flush=True)
