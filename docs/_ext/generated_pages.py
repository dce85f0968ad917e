"""Pages generated from the code (methods, settings of a run, help of the commands, examples) and from results/."""

import argparse
import ast
import os
import re
from dataclasses import MISSING, Field
from pathlib import Path
from typing import Any

import method_comparison
from docutils import nodes
from sphinx.util import logging

import bsam
from bsam.common.method_info import MethodInfo
from bsam.lab import cli
from bsam.lab.analysis.runs_table import read_epochs, read_runs
from bsam.lab.config import settings_by_heading
from bsam.lab.paper import join
from bsam.lab.report.page.page import write_page
from bsam.methods import METHODS

logger = logging.getLogger(__name__)
REPORT = "results-page.html"

OVERVIEW = """\
# Methods

All optimizers are used in the same way, as in `bsam.GSAM(base, model)`. {losses} are loss functions that
work with any optimizer.

:::{{container}} wide-last-column
| class | passes | extra memory | needs | description |
|---|---|---|---|---|
{rows}
:::

**Passes** are forward and backward passes over the whole batch per step, with the default arguments. Fractions are
averages over the steps; AE-SAM's depends on the data. The passes of ESAM and K-SAM are smaller: ESAM computes only some
of the gradients in its first pass and uses half of the samples in its second, and K-SAM uses `k` samples in both. Both
need one more forward pass to choose the samples.

**Extra memory** is that of a step on a GPU beyond the peak of the base optimizer, in units of the parameters' size
([Benchmarks](../benchmarks.md#memory) has the numbers for the CPU and for bfloat16). "Kept" memory persists between
steps and is saved in `state_dict` (for {losses}, in the `state_dict` of the loss). SAF also keeps logits.

A **CUDA graph** always replays the same step; a method with a few kinds of steps needs a graph for each. Steps of these
methods can be captured, those of SANER after its `ramp`: {captured}.

[Accuracy and seconds](accuracy-and-seconds.md) compares all methods on one task.

```{{toctree}}
:hidden:

accuracy-and-seconds
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
  - {passes:.3g} per step
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
.. autoclass:: {path}
{options}
```

{after}
"""
OPTIMIZER = (
    "[`step`](../reference/optimizers.md), `backward` and `state_dict` are inherited from "
    "{class}`bsam.SharpnessAware`. See also [which radius to start with](../guides/methods-and-radii.md)."
)
LOSS = "The loss is a `torch.nn.Module`, and its `state_dict` includes what it keeps between steps."
COMMANDS = """\
# Command line

`bsam` and `python -m bsam` are the same command. `bsam COMMAND --help` prints the texts below.

{commands}
"""
EXAMPLES = """\
# Examples

Short scripts in the folder `examples/` of the repository. They run in seconds on a CPU (`gpt_from_scratch`: in minutes)
and download nothing; the tests run all of them.

{examples}
"""
SETTINGS = """\
# Settings of a run

These are the arguments of {{meth}}`Run.of <bsam.lab.training.Run.of>`. Written with dashes, they are also the flags of
[`bsam train`](command-line.md), except that `arguments` is `--set` and `base_arguments` is `--base-set` there.
{{class}}`Run <bsam.lab.training.Run>` itself takes the settings of a task as an object:
`Run("sam", task=ClassificationSettings(label_noise=0.4))`.

{groups}
"""
SETTING_GROUP = """\
## {title}

:::{{container}} wide-last-column stacked-rows
| setting | default | meaning |
|---|---|---|
{rows}
:::
"""


def pages() -> dict[str, str]:
    """Return the text of each page by its path below docs/."""
    return {
        "methods/index.md": overview(),
        "methods/accuracy-and-seconds.md": method_comparison.page(),
        **{f"methods/{name}.md": method_page(name, method) for name, method in METHODS.items()},
        "reference/settings.md": SETTINGS.format(groups="\n".join(setting_groups())),
        "reference/examples.md": EXAMPLES.format(examples="\n".join(map(example_section, example_files()))),
        "reference/command-line.md": COMMANDS.format(commands="\n".join(map(help_of, parsers()))),
    }


def overview() -> str:
    """Return the page with the table of all methods."""
    rows = (
        f"| [`{m.__name__}`]({name}.md) | {m.passes:.3g} | {m.memory_in_words()} | {m.needs_in_words() or '-'} "
        f"| {m.purpose} |"
        for name, m in METHODS.items()
    )
    captured = ", ".join(m.title for m in METHODS.values() if m.capturable)
    losses = " and ".join(f"`{m.__name__}`" for m in METHODS.values() if m.is_loss)
    return OVERVIEW.format(rows="\n".join(rows), toctree="\n".join(METHODS), captured=captured, losses=losses)


def method_page(name: str, method: type[MethodInfo]) -> str:
    """Return the page of a method."""
    name_in_docs = "bsam" if getattr(bsam, method.__name__, None) is method else method.__module__
    link = f"[{method.reference}](https://arxiv.org/abs/{method.arxiv})"
    return PAGE.format(
        title=method.title,
        purpose=method.purpose,
        passes=method.passes,
        memory=method.memory_in_words(),
        needs=method.needs_in_words() or "only a closure that returns the loss",
        captured="can" if method.capturable else "cannot",
        name=name,
        reference=link if method.arxiv else method.reference,
        path=f"{name_in_docs}.{method.__name__}",
        options="   :members: set_epoch, forward" if method.is_loss else "",
        after=LOSS if method.is_loss else OPTIMIZER,
    )


def setting_groups() -> list[str]:
    """Return a section for each group of settings."""
    groups = settings_by_heading()
    return [SETTING_GROUP.format(title=title, rows="\n".join(map(setting_row, groups[title]))) for title in groups]


def setting_row(setting: Field[Any]) -> str:
    """Return the row of a setting, with its help text on the command line."""
    default = (
        "-" if setting.default is MISSING else f"`{getattr(setting.default, 'name', setting.default)!r}`"
    )  # of a task
    about = setting.metadata["help"]
    flags_as_code = re.sub(r"(?<!`)--[a-z][a-z-]+", r"`\g<0>`", about)
    return f"| `{setting.name}` | {default} | {flags_as_code} |"


def example_files() -> list[Path]:
    """Return the examples, the shortest complete loop first."""
    folder = Path(__file__).parents[2] / "examples"
    return sorted(folder.glob("*.py"), key=lambda path: (path.stem != "minimal", path.stem))


def example_section(path: Path) -> str:
    """Return the section of an example: its docstring, and how to run it."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    about, _, run = docstring.partition("Run: ")
    command, needs = run.partition("        ")[0], re.search(r"pip install [^)]+", run)
    lines = [*([needs[0]] if needs else []), command]
    link = f"The file: {{download}}`{path.name} <../../examples/{path.name}>`"
    return "\n".join([f"## {path.stem}", "", about.strip(), "", "```bash", *lines, "```", "", link, ""])


def parsers() -> list[argparse.ArgumentParser]:
    """Return the parsers of ``bsam`` and of its commands."""
    return [cli.parser_of([]), *map(parser_of_command, cli.COMMANDS)]


def parser_of_command(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command, with its flags."""
    actions = cli.parser_of([name])._actions
    return next(action.choices[name] for action in actions if isinstance(action, argparse._SubParsersAction))


def help_of(parser: argparse.ArgumentParser) -> str:
    """Return the section of a command, with its help."""
    return f"## {parser.prog}\n\n```text\n{parser.format_help().rstrip()}\n```\n"


def write(app: Any) -> None:
    """Write the pages that have changed, and remove those of methods that no longer exist."""
    os.environ["COLUMNS"] = "89"  # for argparse, which leaves two of them free
    texts = pages()
    for path in Path(app.srcdir, "methods").glob("*.md"):
        if f"methods/{path.name}" not in texts:
            path.unlink()
    for name, text in texts.items():
        path = Path(app.srcdir, name)
        path.parent.mkdir(exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
    method_comparison.draw(Path(app.srcdir, "methods", method_comparison.FIGURE))


def with_dashes(app: Any, doctree: Any, page: str) -> None:
    """Replace the two hyphens that Sphinx writes between a parameter and its description with a dash."""
    for text in list(doctree.findall(lambda node: isinstance(node, nodes.Text) and str(node) == " -- ")):
        text.parent.replace(text, nodes.Text(" \N{EN DASH} "))


def write_report(app: Any) -> None:
    """Write the page of results/ into the site; a file there that cannot be read is a warning."""
    if app.builder.format == "html":
        Path(app.outdir).mkdir(parents=True, exist_ok=True)
        problems: list[str] = []
        runs = join(read_runs([Path(__file__).parents[2] / "results"], problems))
        for problem in problems:
            logger.warning(problem)
        write_page(Path(app.outdir, REPORT), runs, read_epochs(runs), title="Results of bsam")


def setup(app: Any) -> dict[str, bool]:
    """Write the pages before Sphinx looks for its sources, and that of the results next to those of Sphinx.

    Later, autodoc replaces the defaults in signatures with their source text, which the page of results cannot read.
    """
    app.connect("builder-inited", write)
    app.connect("builder-inited", write_report)
    app.connect("doctree-resolved", with_dashes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
