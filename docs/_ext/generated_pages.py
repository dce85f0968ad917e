"""Pages that are made from the code: one for each method, their overview, the settings of a run, the help of every
command, and the examples.
"""

import argparse
import ast
import os
import re
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any

from docutils import nodes

from bsam.cli import _parser
from bsam.common.method_info import MethodInfo
from bsam.methods import METHODS
from bsam.training import Run

OVERVIEW = """\
# Methods

All optimizers are used alike: `bsam.GSAM(base, model)`. `SAF` and `MESA` are losses, for any optimizer.

:::{{container}} wide-last-column
| class | passes | extra memory | needs | when to use it |
|---|---|---|---|---|
{rows}
:::

**Passes** are forward and backward passes of the whole batch in a step, with the default arguments. Those of LookSAM,
AE-SAM and RST are averages; AE-SAM's depends on the data. ESAM leaves out some gradients in its first pass and half of
the samples in its second, K-SAM takes both on `k` samples, and each needs one more forward pass to choose them.

**Extra memory** is beyond the base optimizer's own peak, in units of the parameters' size, measured on the CPU by
`benchmarks/memory.py`. What is kept is there between steps, and in `state_dict` (of the loss itself, for SAF and MESA).

**CUDA graphs** always replay the same step, so they cannot contain what changes from step to step. Steps of these
methods can be captured: {captured}.

```{{toctree}}
:hidden:

{toctree}
```
"""
PAGE = """\
# {title}

{purpose}

:::{{list-table}}
:stub-columns: 1
:class: facts

* - Passes
  - {passes:g} per step
* - Extra memory
  - {memory} ([in units of the parameters' size](index.md))
* - Needs
  - {needs}
* - CUDA graph
  - a step {captured} be captured
* - Command
  - `bsam train --method {name}`
* - Paper
  - {reference}
:::

```{{eval-rst}}
.. autoclass:: bsam.{cls}
{options}
```

{after}
"""
OPTIMIZER = (
    "[`step`](../reference/optimizers.md), `backward` and `state_dict` are those of "
    "{class}`bsam.SharpnessAware`; [which radius to start with](../guides/methods-and-radii.md)."
)
PAPERS = {  # on arXiv
    "sam": "2010.01412",
    "asam": "2102.11600",
    "gsam": "2203.08065",
    "fisher_sam": "2206.04920",
    "friendly_sam": "2403.12350",
    "pgn": "2202.03599",
    "gam": "2303.03108",
    "looksam": "2203.02714",
    "esam": "2110.03141",
    "ksam": "2210.12864",
    "msam": "2401.12033",
    "aesam": "2304.14647",
    "rst": "2203.09962",
    "saf": "2205.14083",
    "mesa": "2205.14083",
    "bsam": "2409.13173",
}
LOSS = "It is a `torch.nn.Module`: `state_dict` holds what it remembers."
COMMANDS = """\
# Command line

`bsam` and `python -m bsam` are the same command. `bsam COMMAND --help` prints what is below.

{commands}
"""
EXAMPLES = """\
# Examples

Short scripts that run in seconds on a CPU and download nothing; the tests run all of them. They are in the folder
`examples/` of the repository.

{examples}
"""
SETTINGS = """\
# Settings of a run

The arguments of {{class}}`bsam.training.Run`, and with dashes the flags of [`bsam train`](command-line.md).

:::{{container}} wide-last-column stacked-rows
| setting | default | what it is |
|---|---|---|
{rows}
:::
"""


def pages() -> dict[str, str]:
    """Return the text of each page by its path below docs/."""
    return {
        "methods/index.md": overview(),
        **{f"methods/{name}.md": method_page(name, method) for name, method in METHODS.items()},
        "reference/settings.md": SETTINGS.format(rows="\n".join(map(setting_row, settings()))),
        "reference/examples.md": EXAMPLES.format(examples="\n".join(map(example_section, example_files()))),
        "reference/command-line.md": COMMANDS.format(commands="\n".join(map(help_of, parsers()))),
    }


def overview() -> str:
    """Return the page with the table of all methods."""
    rows = (
        f"| [`{m.__name__}`]({name}.md) | {m.passes:g} | {m.memory} | {m.needs_in_words() or '-'} | {m.purpose} |"
        for name, m in METHODS.items()
    )
    captured = ", ".join(m.title for m in METHODS.values() if m.capturable)
    return OVERVIEW.format(rows="\n".join(rows), toctree="\n".join(METHODS), captured=captured)


def method_page(name: str, method: type[MethodInfo]) -> str:
    """Return the page of a method."""
    return PAGE.format(
        title=method.title,
        purpose=method.purpose,
        passes=method.passes,
        memory=method.memory,
        needs=method.needs_in_words() or "nothing but a closure that returns the loss",
        captured="can" if method.capturable else "cannot",
        name=name,
        reference=f"[{method.reference}](https://arxiv.org/abs/{PAPERS[name]})",
        cls=method.__name__,
        options="   :members: set_epoch, forward" if method.is_loss else "",
        after=LOSS if method.is_loss else OPTIMIZER,
    )


def settings() -> list[Field[Any]]:
    """Return the settings of a run, the method and its arguments first."""
    return sorted(fields(Run), key=lambda setting: setting.kw_only is True)


def setting_row(setting: Field[Any]) -> str:
    """Return the row of a setting, with the help that the command line shows."""
    default = "-" if setting.default is MISSING else f"`{setting.default!r}`"
    about = setting.metadata.get("help", "the arguments of the method, by name")
    flags_as_code = re.sub(r"(?<!`)--[a-z][a-z-]+", r"`\g<0>`", about)
    return f"| `{setting.name}` | {default} | {flags_as_code} |"


def example_files() -> list[Path]:
    """Return the examples, the shortest complete loop first."""
    folder = Path(__file__).parents[2] / "examples"
    return sorted(folder.glob("*.py"), key=lambda path: (path.stem != "minimal", path.stem))


def example_section(path: Path) -> str:
    """Return what an example shows, from its docstring, and the line that runs it."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    about, _, run = docstring.partition("Run: ")
    command, needs = run.partition("        ")[0], re.search(r"pip install [^)]+", run)
    lines = [*([needs[0]] if needs else []), command]
    link = f"The file: {{download}}`{path.name} <../../examples/{path.name}>`"
    return "\n".join([f"## {path.stem}", "", about.strip(), "", "```bash", *lines, "```", "", link, ""])


def parsers() -> list[argparse.ArgumentParser]:
    """Return the parser of ``bsam``, those of its commands, and those of their actions."""
    return _with_subparsers(_parser())


def _with_subparsers(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    inside = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return [parser, *(each for action in inside for sub in action.choices.values() for each in _with_subparsers(sub))]


def help_of(parser: argparse.ArgumentParser) -> str:
    """Return the section of a command."""
    return f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n"


def write(app: Any) -> None:
    """Write the pages that have changed, and remove those of methods that are gone."""
    os.environ["COLUMNS"] = "89"  # of argparse, which leaves two of them free
    made = pages()
    for path in Path(app.srcdir, "methods").glob("*.md"):
        if f"methods/{path.name}" not in made:
            path.unlink()
    for name, text in made.items():
        path = Path(app.srcdir, name)
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def with_dashes(app: Any, doctree: Any, page: str) -> None:
    """Write a dash between a parameter and its description, where Sphinx has two hyphens."""
    for text in list(doctree.findall(lambda node: isinstance(node, nodes.Text) and str(node) == " -- ")):
        text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def setup(app: Any) -> dict[str, bool]:
    """Write the pages before Sphinx looks for its sources."""
    app.connect("builder-inited", write)
    app.connect("doctree-resolved", with_dashes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
