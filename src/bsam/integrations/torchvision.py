"""Make torchvision importable beside a CPU build of torch, and with it the frameworks that import torchvision.

Import this module before Lightning, Transformers or PEFT. It does nothing if torchvision works or is not installed. The
integrations of Lightning, Transformers and timm import it.

Example::

    import bsam.integrations.torchvision  # before peft
    from peft import LoraConfig
"""

from ..common.timm_import import import_torchvision

import_torchvision()
