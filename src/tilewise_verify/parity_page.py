"""A page of what tests with the fixture cp_parity have found; it loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from tilewise_verify.palette import variables

HEAD = f"""<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Context parallelism: parity</title><style>
{variables()}body {{
  font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em;
  color: var(--ink); background: var(--ground);
}}
pre {{ white-space: pre-wrap; overflow-wrap: anywhere; background: var(--card); padding: 0.8em }}
h2 {{ font-size: 1.05em; border-top: 1px solid var(--line); padding-top: 1em }}
h2, figcaption {{ overflow-wrap: anywhere }}
figure {{ margin: 0; break-inside: avoid }}
svg {{ max-width: 100%; height: auto }}
</style></head><body>
<h1>Is the split model the same as the unsplit one?</h1>
"""
PICTURE = (
    "What the layer attends to: queries downward, keys to the right. Both models attend to blue "
    "pairs, the split one alone to red ones, the unsplit one alone to yellow ones."
)


def parity_page(tests: Sequence[tuple[str, Mapping[str, str]]]) -> str:
    """Return HTML of comparisons: each test's name, and its text, note and svg."""
    parts = [HEAD, f"<p>{len(tests)} comparisons</p>\n"]
    for name, result in tests:
        parts.append(f"<h2>{escape(name)}</h2>\n<pre>{escape(result['text'])}</pre>\n")
        if result["svg"]:
            parts.append(f"<figure>{result['svg']}<figcaption>{PICTURE}</figcaption></figure>\n")
    return "".join([*parts, "</body></html>\n"])
