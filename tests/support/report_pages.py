"""Pages to test with, and a browser to look at them."""

import json
import random
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tilewise as tw
from tilewise_tools.report.bench_report import page_of, read_rows
from tilewise_tools.report.drawing import Drawing
from tilewise_tools.report.page import Figure, written
from tilewise_tools.report.plan_report import ReportedPlan

MACHINE = tw.Machine.preset("h100x8-1nic")
SWITCHES = (
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
)


def subject(plan: tw.Plan, num_tokens: int = 64, mask: tw.Mask | None = None) -> ReportedPlan:
    """A plan on a small workload, for which only few sizes are simulated."""
    work = tw.Workload(num_tokens, 8, 2, 64, mask=tw.Full() if mask is None else mask)
    return ReportedPlan(plan, work, MACHINE, reason="It is <small> & fast.")


def chart(figure: Figure) -> Drawing:
    """A figure's chart, which is no table of cells."""
    assert isinstance(figure.drawing, Drawing)
    return figure.drawing


def row(contender: str, mask: str = "causal", **fields: Any) -> dict[str, Any]:
    """A row as tilewise bench writes it."""
    made = {"format": 1, "kind": "kernels", "contender": contender, "library": "tilewise"}
    made |= {"mask": mask, "seed": 0, "num_tokens": 1024, "num_heads": 8, "num_kv_heads": 8}
    made |= {"head_dim": 64, "dtype": "float32", "pass": "both", "world_size": 1, "device": "cpu"}
    made |= {"outcome": "ok", "message": "", "median_seconds": 1.0, "is_exact": True}
    made |= fields
    made["tokens_per_rank"] = made["num_tokens"] / made["world_size"]
    return made | {"key": f"{hash(json.dumps(made, sort_keys=True)) & (1 << 64) - 1:016x}"}


def many_rows() -> list[dict[str, Any]]:
    """Rows of all masks, some of each outcome, with bytes and predictions."""
    draw = random.Random(0)
    rows = []
    for mask in tw.masks.NAMES:
        for n in (2, 4, 8):
            for who in ("ring", "mesh", "ulysses", "tiled", "a library with a long name"):
                seconds = n * draw.uniform(0.5, 2)
                rows.append(
                    row(
                        who,
                        mask,
                        kind="strategies",
                        world_size=n,
                        num_tokens=512 * n,
                        median_seconds=seconds,
                        predicted_seconds=seconds * draw.uniform(0.7, 1.2),
                        bytes_max_rank=draw.randrange(1 << 16, 1 << 20),
                    )
                )
        for who, outcome in (("cpu", "ok"), ("naive", "out_of_memory"), ("flex", "unsupported")):
            rows.append(row(who, mask, outcome=outcome, message="why"))
    return rows


def write_rows(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(one) + "\n" for one in rows))
    return path


HOSTILE = (
    *("<img src=x onerror=alert(1)>", "</script><script>alert(1)</script>", "<!--<script>"),
    *("<b>bold</b>", '<a href="https://example.org">link</a>', "a<br>b", "<extra>x</extra>"),
    *("&lt;b&gt;", "%{y}", "$title", "' onmouseover='alert(1)", '" autofocus onfocus="alert(1)'),
    *("javascript:alert(1)", "{{7*7}}", "\u2028alert(1)", "]]>", "a\nb", "\x00", "x" * 400),
)


def hostile_pages(folder: Path) -> dict[str, Path]:
    """A page for every text field of a row, whose rows hold the hostile texts there."""
    texts = [name for name, value in row("a").items() if isinstance(value, str)]
    more = ("message", "machine", "cpu", "gpu", "commit", "corpus", "network", "library_version")
    pages = {}
    for name in dict.fromkeys((*texts, *more)):
        if name in ("kind", "key", "outcome"):
            continue
        rows = [
            row(f"c{i}", outcome="failed" if i % 3 else "ok", num_tokens=1024 * (1 + i % 4))
            | {name: text, "key": str(i), "tflops": 2.0, "predicted_seconds": 1.0}
            | {"peak_bytes": 1 + i, "bytes_max_rank": 1 + i}
            for i, text in enumerate(HOSTILE)
        ]
        found = read_rows([write_rows(folder / f"{name}.jsonl", rows)])
        pages[name] = folder / f"{name}.html"
        pages[name].write_text(written(page_of(found)))
    return pages


@contextmanager
def browser() -> Iterator[Any]:
    """A headless Chromium with an empty profile, driven by selenium."""
    from selenium import webdriver
    from selenium.webdriver.chrome.options import Options
    from selenium.webdriver.chrome.service import Service

    options = Options()
    options.binary_location = chromium() or ""
    with tempfile.TemporaryDirectory() as profile:
        for switch in (*SWITCHES, f"--user-data-dir={profile}"):
            options.add_argument(switch)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
        driver = webdriver.Chrome(options, Service(shutil.which("chromedriver")))
        try:
            yield driver
        finally:
            driver.quit()


def chromium() -> str | None:
    """Where a Chromium is that has its driver beside it."""
    found = shutil.which("chromium") or shutil.which("google-chrome")
    return found if shutil.which("chromedriver") else None
