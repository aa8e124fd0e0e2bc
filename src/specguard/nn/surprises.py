"""Whatever can make a module compute something else than its type says."""

from collections.abc import Iterator

from torch import nn
from torch.nn.modules import module as torch_module

from specguard.errors import ConfigError


def surprises(model: nn.Module) -> Iterator[tuple[str, str]]:
    """Each module that has a forward hook or a replaced function: its path, or "the model", and what it has.

    Hooks that are set on all modules at once are an error, for they belong to none.
    """
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        raise ConfigError("hooks are set on all modules; nothing is known of what they do")
    for name, layer in model.named_modules():
        what = name or "the model"
        if layer._forward_hooks or layer._forward_pre_hooks:
            yield what, "a forward hook"
        for attribute, value in vars(layer).items():
            if attribute in ("forward", "__call__") or (callable(value) and hasattr(type(layer), attribute)):
                yield what, f"a replaced {attribute} function"
