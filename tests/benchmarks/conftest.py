"""The benchmarks are in the source tree alone: beside an installed package their tests are left out."""

from __future__ import annotations

from pathlib import Path

collect_ignore_glob = [] if (Path(__file__).parents[2] / "benchmarks").is_dir() else ["test_*.py"]
