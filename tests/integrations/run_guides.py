"""Run the code of guides, each in its own namespace, with the packages of one folder and no others.

python run_guides.py PACKAGES GUIDE=EXPRESSION ...  prints the values of the expressions after their guides, as JSON.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def main(packages: str, *guides: str) -> None:
    import torch

    sys.path[:] = [*(path for path in sys.path if not path.endswith("-packages")), packages]
    values = {}
    for guide in guides:
        name, expression = guide.split("=", 1)
        torch.manual_seed(0)
        names = {"__name__": "docs"}
        text = (ROOT / "docs/guides" / f"{name}.md").read_text(encoding="utf-8")
        for code in re.findall(r"^```python\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
            exec(compile(code, f"{name}.md", "exec"), names)
        values[name] = eval(expression, names)
    print()
    print(json.dumps(values))


if __name__ == "__main__":
    main(*sys.argv[1:])
