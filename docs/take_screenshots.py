"""Screenshots of the built site in headless Chromium, dark and light. Usage: python docs/take_screenshots.py OUT

Run `make docs` first. Chromium has to be on the path, as chromium, chromium-browser or google-chrome. The pages come
from a server of this process, as search and the choice of colours need one.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import subprocess
import tempfile
import threading
from pathlib import Path

SITE = Path(__file__).parents[1] / "out" / "site"
PAGES = (
    "index.html",
    "five_minutes.html",
    "benchmarks/index.html",
    "guides/kronecker.html",
    "guides/adapters.html",
    "reference/products.html",
)
SCHEMES = {"light": 1, "dark": 0}  # Chromium's preferredColorScheme


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def browser() -> str:
    found = [path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))]
    if not found:
        raise SystemExit("there is no chromium, chromium-browser or google-chrome on the path")
    return found[0]


def take(chromium: str, url: str, scheme: str, out: Path) -> None:
    """Write a picture of a page, 1280 x 1600 pixels."""
    with tempfile.TemporaryDirectory() as profile:
        command = [
            *(chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"),
            *(f"--blink-settings=preferredColorScheme={SCHEMES[scheme]}", "--window-size=1280,1600", "--virtual-time-budget=5000"),
            *(f"--screenshot={out}", url),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    if not out.is_file():
        raise SystemExit(f"{chromium} wrote no {out}")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    missing = [page for page in PAGES if not (SITE / page).is_file()]
    if missing:
        raise SystemExit(f"{SITE} has no {', '.join(missing)}: run make docs")
    chromium = browser()
    handler = functools.partial(Quiet, directory=str(SITE))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        for page in PAGES:
            for scheme in SCHEMES:
                name = f"{page.removesuffix('.html').replace('/', '_')}_{scheme}.png"
                take(chromium, f"http://127.0.0.1:{server.server_port}/{page}", scheme, out / name)
                print(out / name)
        server.shutdown()


if __name__ == "__main__":
    main()
