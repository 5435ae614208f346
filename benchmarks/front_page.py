"""Tables of the README and of the site's first pages: ``python -m benchmarks.front_page [--check]`` makes them from benchmarks/results.

A page has its tables between the lines ``<!-- figures: NAME -->`` and ``<!-- end -->``. README.md and docs/index.md state no other speed.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.markdown import times_text
from benchmarks.ratios import device_medians, geometric_mean, medians

ROOT: Final = Path(__file__).parents[1]
RESULTS: Final = ROOT / "benchmarks" / "results"
# Page of the repository: the way from its folder to docs/.
PAGES: Final = {"README.md": "docs/", "docs/index.md": "", "docs/benchmarks/index.md": "../"}
BLOCK: Final = re.compile(r"(?<=<!-- figures: )(\w+)( -->\n).*?(?=<!-- end -->)", re.DOTALL)


@cache
def record(name: str) -> dict[str, Any]:
    """A benchmark's recorded run."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text())
    return found


class Range(NamedTuple):
    """Speed-ups over a baseline: their geometric mean, the smallest, the largest, and how many cases they are of."""

    mean: float
    smallest: float
    largest: float
    cases: int

    def __str__(self) -> str:
        """The mean, and the range of several cases."""
        spread = f" ({times_text(self.smallest)} to {times_text(self.largest)})" if self.cases > 1 else ""
        return f"{times_text(self.mean)}{spread}"


def spread(ratios: list[float]) -> Range:
    """The range of speed-ups."""
    return Range(geometric_mean(ratios), min(ratios), max(ratios), len(ratios))


def speed_up(name: str, baseline: str, times: Callable[[dict[str, Any]], dict[str, float]] = medians) -> Range:
    """The baseline's time over fastkron_py's in every case of a run that has both."""
    found = record(name)
    pairs = [(times(case), found["subject"]) for case in found["cases"]]
    return spread([t[baseline] / t[subject] for t, subject in pairs if baseline in t and subject in t])


def recorded_speed_up(name: str, baseline: str) -> Range:
    """The same, of a baseline that was timed in another run on the same kind of GPU."""
    found = record(name)
    pairs = [(case["recorded"].get(baseline), medians(case)[found["subject"]]) for case in found["cases"]]
    return spread([figure["seconds"] / ours for figure, ours in pairs if figure])


def machine(name: str) -> str:
    """The device of a run, and its day."""
    environment = record(name)["environment"]
    device = environment["device"].removeprefix("NVIDIA ").split()[0]
    told = f"CPU ({environment['cpu']}, {environment['threads']} threads)" if device == "cpu" else device
    return f"{told}, {environment['date'][:10]}"


def before_and_after(name: str, label: str, baseline: str) -> str:
    """Time and peak memory of one case: of the baseline, then of fastkron_py."""
    found = record(name)
    (case,) = (case for case in found["cases"] if case["label"] == label)
    of = {r["contender"]: r for r in case["results"]}
    theirs, ours = (f"{_seconds(r['times']['median'])} and {_bytes(r['peak_bytes'])}" for r in (of[baseline], of[found["subject"]]))
    return f"{theirs} become {ours}"


def _seconds(value: float) -> str:
    return f"{value:.3g} s" if value >= 1 else f"{value * 1e3:.3g} ms"


def _bytes(value: float) -> str:
    return f"{value / 1e9:.2g} GB" if value >= 1e9 else f"{value / 1e6:.2g} MB"


def _headline(docs: str) -> list[list[str]]:
    """Of products also eager calls beside CUDA graphs, and the CPU."""

    def of(name: str, baseline: str, times: Callable[[dict[str, Any]], dict[str, float]] = medians) -> str:
        return times_text(speed_up(name, baseline, times).mean)

    step = before_and_after("botorch_fit_cpu", "KroneckerMultiTaskGP 300 x 20", "BoTorch")
    llama = before_and_after("lokr_llama", "8 layers of width 4096, 2 x 2048 tokens, w1 8 x 8, rank 32", "PEFT")
    return [
        ["you use", "you get", "measured on"],
        [
            f"[Kronecker products]({docs}guides/kronecker.md)",
            f"{of('kron', 'GPyTorch')} the speed of GPyTorch, "
            f"{times_text(recorded_speed_up('kron', 'FastKron (recorded)').mean)} that of FastKron (not tuned, in another run)",
            machine("kron"),
        ],
        [
            "small products",
            f"{of('kron_small', 'GPyTorch')} the speed of GPyTorch in eager calls, "
            f"{of('kron_small', 'GPyTorch', device_medians)} in CUDA graphs",
            machine("kron_small"),
        ],
        [
            f"[products on a CPU]({docs}benchmarks/cpu.md)",
            f"{of('kron_cpu', 'GPyTorch')} the speed of GPyTorch, {of('kron_cpu', 'pyfastkron')} that of FastKron",
            machine("kron_cpu"),
        ],
        [f"[Gaussian processes]({docs}guides/gpytorch.md)", f"a BoTorch training step: {step}", machine("botorch_fit_cpu")],
        [f"[LoKr adapters]({docs}guides/adapters.md)", f"a PEFT training step of a Llama: {llama}", machine("lokr_llama")],
    ]


def _scaling(grid: str) -> str:
    """The speed of four GPUs over that of one, of 64^4 with 128 rows in float32."""
    products = record("distributed_4_h200")["scaling"]["products"]
    (found,) = (p for p in products if p["name"] == "64^4 float32, 128 rows")
    (seconds,) = (g["seconds"] for g in found["grids"] if g["grid"] == grid)
    return times_text(found["alone"] / seconds)


# The page of a guide, the words that link to it and those behind them; then of each comparison: benchmark, baseline, and its words.
INCLUDED: Final = (
    (
        ("operators", "Lazy operators", ": `solve`, `logdet`, `eigh`, samples"),
        ("kron_solve", "Cholesky of the dense matrix", "a dense Cholesky solve"),
    ),
    (
        ("kronecker", "Rotations and Hadamard transforms", ""),
        ("rotate", "comfy-kitchen", "comfy-kitchen"),
        ("hadamard", "fast_hadamard_transform", "fast_hadamard_transform"),
    ),
    (
        ("kan", "Kolmogorov-Arnold networks", " over nine bases"),
        ("poly_kan_backward", "torch.compile of the recurrence", "`torch.compile`, with gradients"),
    ),
    (
        ("kat", "Kolmogorov-Arnold transformers", " in timm"),
        ("kat", "FlashKAT's algorithm", "FlashKAT's algorithm"),
        ("kat", "ViT", "a ViT"),
    ),
    (
        ("gated_mlp", "Gated MLPs", " of Llama, Mistral, Qwen and Gemma"),
        ("gated", "cuBLAS + SwiGLU kernel", "cuBLAS and a SwiGLU kernel"),
    ),
)


def _included(docs: str) -> list[list[str]]:
    rows = [["also included", "you get", "measured on"]]
    for (page, link, rest), *compared in INCLUDED:
        told = [f"{times_text(speed_up(name, baseline).mean)} the speed of {words}" for name, baseline, words in compared]
        machines = dict.fromkeys(machine(name) for name, *_ in compared)
        rows.append([f"[{link}]({docs}guides/{page}.md){rest}", ", ".join(told), "; ".join(machines)])
    columns, whole = _scaling("1 x 4"), _scaling("4 x 1")
    many = f"[Many GPUs]({docs}guides/many_gpus.md): torchrun, mpirun or Slurm"
    return [*rows, [many, f"four have {columns} to {whole} the speed of one", machine("distributed_4_h200")]]


def _comparisons(docs: str) -> list[list[str]]:
    """Rows of one table: the slower ones stand among the others."""

    def row(
        what: str, page: str, name: str, baseline: str, told: str = "", of: Callable[[str, str], Range] = speed_up, how: str = "device time"
    ) -> list[str]:
        found = of(name, baseline)
        return [f"[{what}]({docs}{page})", told or baseline, str(found), str(found.cases), how, machine(name)]

    def graphs(name: str, baseline: str) -> Range:
        return speed_up(name, baseline, device_medians)

    kron, kan, adapters = "benchmarks/kronecker.md", "benchmarks/kan.md", "benchmarks/adapters.md"
    gated, gp, kat = "benchmarks/gated_mlp.md", "benchmarks/gpytorch.md", "benchmarks/rational.md"
    cpu = "benchmarks/cpu.md"
    fastkron = "FastKron 1.1.0, not tuned, timed in another run"
    rows = [
        row("products, float32", kron, "kron", "GPyTorch"),
        row("products, float32", kron, "kron", "FastKron (recorded)", fastkron, recorded_speed_up),
        row("small products, float32", kron, "kron_small", "GPyTorch", how="eager"),
        row("small products, float32", kron, "kron_small", "GPyTorch", of=graphs, how="CUDA graphs"),
        row("products, float32", cpu, "kron_cpu", "GPyTorch", how="eager"),
        row("products, float32", cpu, "kron_cpu", "pyfastkron", "FastKron 1.1.0's CPU build", how="eager"),
        row("forward and backward, float32", kron, "kron_backward", "matmul + transpose", "torch, one factor at a time"),
        row("products, bfloat16 and float16", kron, "kron_half", "matmul + transpose", "torch, one factor at a time"),
        row("products, float64", kron, "kron_float64", "GPyTorch"),
        row("Hadamard transforms", kron, "hadamard", "fast_hadamard_transform", "fast_hadamard_transform 1.1.0"),
        row("rotated rows, bfloat16 to int8", kron, "rotate", "comfy-kitchen", "comfy-kitchen 0.2.40"),
        row("gates on 16 and 24 qubits", kron, "quantum", "permute + mm", "permute and torch.mm"),
        row("KISS-GP, a training step", gp, "gp_ski", "GPyTorch", how="eager"),
        row("KISS-GP, a training step", gp, "gp_ski", "GPyTorch, dense factors", how="eager"),
        row("BoTorch models, a training step", gp, "botorch_fit", "BoTorch", how="eager"),
        row("BoTorch models, a training step", gp, "botorch_fit_cpu", "BoTorch", how="eager"),
        row("LoKr layers, forward and backward", adapters, "lokr_backward", "PEFT's formula"),
        row("LoKr on a Llama, a training step", adapters, "lokr_llama", "PEFT", how="eager"),
        row("LoKr on a ViT-B, a training step", adapters, "lokr_vit", "PEFT", how="eager"),
        row("KAN layers, forward and backward", kan, "poly_kan_backward", "torch.compile of the recurrence"),
        row("KAN layers, forward and backward", kan, "poly_kan_cpu_backward", "torch.compile of the recurrence", how="eager"),
        row("rational activations", kat, "rational", "torch GELU", "torch's GELU"),
        row("training KAT", kat, "kat", "FlashKAT's algorithm", how="eager"),
        row("training KAT", kat, "kat", "ViT", "the ViT of its size", how="eager"),
        row("gated MLPs, bfloat16", gated, "gated", "cuBLAS + SwiGLU kernel"),
        row("layers of Llama, Qwen2.5 and Phi-4", gated, "gated_models", "transformers"),
        row("layers of Llama, Qwen2.5 and Phi-4", gated, "gated_models", "Liger's SwiGLU"),
        row("layers of Llama, Qwen2.5 and Phi-4", gated, "gated_models", "torch.compile"),
        row("gated layers", gated, "gated_cpu", "torch", how="eager"),
    ]
    four = [(_scaling(grid), told) for grid, told in (("4 x 1", "rows"), ("2 x 2", "both"), ("1 x 4", "columns"))]
    rows += [
        [
            f"[four GPUs, {told} sharded]({docs}benchmarks/distributed.md)",
            "one GPU",
            figure,
            "1",
            "device time",
            machine("distributed_4_h200"),
        ]
        for figure, told in four
    ]
    return [["what", "baseline", "speed-up", "cases", "time", "measured on"], *rows]


TABLES: Final[dict[str, Callable[[str], list[list[str]]]]] = {"headline": _headline, "included": _included, "comparisons": _comparisons}


def filled(text: str, docs: str) -> str:
    """A page's text with its tables made anew."""

    def block(found: re.Match[str]) -> str:
        head, *rows = TABLES[found[1]](docs)
        lines = [head, ["---"] * len(head), *rows]
        return f"{found[1]}{found[2]}\n" + "".join(f"| {' | '.join(cells)} |\n" for cells in lines) + "\n"

    return BLOCK.sub(block, text)


def with_absolute_links(text: str, repository: str) -> str:
    """The README with links that also work on the package index, which shows it without the files beside it."""
    linked = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{repository}/raw/main/", text)
    return re.sub(r"(?<=\]\()(?!https?:|#)", f"{repository}/blob/main/", linked)


def repository_url() -> str:
    """Where mkdocs.yml says the repository is; empty before it is published."""
    found = re.search(r"^repo_url: *(\S+)", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE)
    return found[1] if found else ""


def made(page: str, text: str) -> str:
    """A page as it has to be."""
    new = filled(text, PAGES[page])
    return with_absolute_links(new, repository_url()) if page == "README.md" and repository_url() else new


def main() -> None:
    """Write the pages, or tell which are not up to date."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.front_page", description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a figure differs from its record")
    check = parser.parse_args().check
    old = {page: (ROOT / page).read_text(encoding="utf-8") for page in PAGES}
    new = {page: made(page, text) for page, text in old.items()}
    changed = [page for page in PAGES if old[page] != new[page]]
    print(f"{'out of date' if check else 'written'}: {', '.join(changed) or 'nothing'}")
    if check:
        sys.exit(bool(changed))
    for page in changed:
        (ROOT / page).write_text(new[page], encoding="utf-8")


if __name__ == "__main__":
    main()
