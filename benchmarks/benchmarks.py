"""The package `benchmarks` for a script that is run by its path: python benchmarks/documents.py.

Python looks beside such a script, not in the folder that it is called from. There it finds this
file, which stands for its own folder and lets `examples` be found too. In the other form, `python
-m benchmarks.documents`, Python finds the folder itself and never reads this file.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
__path__ = [str(ROOT / "benchmarks")]
sys.path.append(str(ROOT))
