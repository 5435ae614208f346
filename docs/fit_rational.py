"""Fit the rational activations' table of initial coefficients, and print it for docs/rational.md.

python docs/fit_rational.py           # fits all, writes fastkron_py/nn/rational_table.json, prints the errors
python docs/fit_rational.py --print   # prints the errors of the table as it is
"""

from __future__ import annotations

import json
import sys

from fastkron_py.nn.rational_fit import FUNCTIONS, INTERVAL, TABLE, TABLE_DEGREES, fit, identity
from fastkron_py.rational.denominators.registry import denominator_names, find_denominator

VERSIONS = [name for name in denominator_names() if not find_denominator(name).is_noisy]


def main() -> None:
    if "--print" not in sys.argv[1:]:
        table: dict[str, dict[str, object]] = {}
        for version in VERSIONS:
            for name, function in FUNCTIONS.items():
                found = identity(TABLE_DEGREES, version) if name == "identity" else fit(function, TABLE_DEGREES, version, INTERVAL)
                entry = {"numerator": found.a.tolist(), "denominator": found.b.tolist(), "error": found.error}
                table.setdefault(version, {})[name] = entry
                print(f"{version} {name:10} {found.error:.2e}", file=sys.stderr)
        TABLE.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")
    table = json.loads(TABLE.read_text(encoding="utf-8"))
    print("| function | " + " | ".join(VERSIONS) + " |\n| --- |" + " --- |" * len(VERSIONS))
    for name in FUNCTIONS:
        print(f"| {name} | " + " | ".join(f"{table[v][name]['error']:.1e}" for v in VERSIONS) + " |")  # type: ignore[index]


if __name__ == "__main__":
    main()
