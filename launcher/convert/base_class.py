"""The class of transformers that a base's checkpoint is of."""

from pathlib import Path
from typing import Any


def base_class(base: str | Path, **options: Any) -> Any:
    """The class that the base's config names, one of a model for images too; else that of a model
    for text. options: of `from_pretrained`. Raises OSError, ValueError.
    """
    import transformers

    config = transformers.AutoConfig.from_pretrained(base, **options)
    named = (config.architectures or [""])[0]
    return getattr(transformers, named, transformers.AutoModelForCausalLM)
