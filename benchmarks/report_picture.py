"""docs/img/report.png: the head of a report's page and who computes what, as Chromium shows them.

    tilewise plan --world-size 256 --num-tokens 1M --heads 32:8 --mask full --machine h100x8 -o plan.json
    tilewise report plan.json -o report.html
    python benchmarks/report_picture.py report.html docs/img/report.png

The sections before the assignment are left out, so that both fit one picture. Needs Chromium.
"""  # noqa: E501 - the command is one line

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from tilewise_tools.naming import Parser, new_file, run_script

SIZE, SCALE = "1280,1375", "0.703125"  # of the window; the picture's pixels are their product
DRAWN = "20000"  # milliseconds of the page's clock, by which its charts are drawn
SECTION, PARTS = r'<section id="(?:why|others)">.*?</section>', r"<nav .*?</nav>"


def main() -> None:
    parser = Parser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("page", type=Path, metavar="HTML")
    parser.add_argument("picture", type=new_file, metavar="PNG")
    given = parser.parse_args()
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        parser.error("no chromium or google-chrome is installed")
    html = re.sub(f"{SECTION}|{PARTS}", "", given.page.read_text(), flags=re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        shortened = Path(folder) / "page.html"
        shortened.write_text(html)
        options = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
        options += (
            f"--window-size={SIZE}",
            f"--force-device-scale-factor={SCALE}",
            f"--virtual-time-budget={DRAWN}",
        )
        options += (f"--user-data-dir={folder}/profile", f"--screenshot={given.picture.resolve()}")
        command = [browser, *options, shortened.as_uri()]
        subprocess.run(command, check=True, stderr=subprocess.DEVNULL)


if __name__ == "__main__":
    run_script(main)
