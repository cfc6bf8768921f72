"""The page docs/reference/families.md, made from the registry."""

from loraplex.launcher.known_models import KnownModel, served_families
from loraplex.server.model.families.registry import architectures, read_model
from loraplex.server.model.ops.kernel_limits import unsupported
from loraplex.server.model.ops.memory import layer_token_bytes, weights_bytes
from loraplex.server.model.spec.model_spec import ModelSpec

_HEAD = """\
# Families of models

<!-- Written by `python -m tools.docs`; a test holds it fresh. -->

A model is served if its `config.json` names one of these types, and says nothing that its family
cannot compute. [Models](models.md) has the rules; `loraplex info MODEL` tries any `config.json`.

| `model_type` | architecture | models |
| --- | --- | --- |
"""
_KNOWN = """
## On a GPU

One known model of each family, in bfloat16, on a GPU of compute capability 9.0. What the kernels do
not compute is computed by torch, on the GPU, too: right, and slower. One missing part leaves the
whole model to torch, with LoRA and sampling, and without CUDA graphs. Keys and values are those of
one token; GB are 10^9 bytes.

| model | weights | keys and values | computed by |
| --- | --: | --: | --- |
"""
_CAPABILITY = (9, 0)


def render() -> str:
    """The whole page."""
    families, served = served_families(), architectures()
    rows = [
        f"| `{name}` | `{served[name]}` | {known.covers} |\n" for name, known in families.items()
    ]
    examples = [_example(known) for known in families.values() if known.example]
    return "".join([_HEAD, *rows, _KNOWN, *examples])


def listed() -> str:
    """All types, in the words of the README's list."""
    *names, last = (f"`{name}`" for name in sorted(architectures()))
    return f"{', '.join(names)} and {last}"


def _example(known: KnownModel) -> str:
    try:
        model = read_model(known.config)
    except ValueError as error:
        return f"| {known.example} | | | {error} |\n"
    reason = unsupported(model, "bfloat16", _CAPABILITY)
    ways = "the project's kernels" if reason is None else f"torch: {reason}"
    weights = weights_bytes(model, "bfloat16", packed=True) / 1e9
    return f"| {known.example} | {weights:.1f} GB | {_kv_bytes(model):,} bytes | {ways} |\n"


def _kv_bytes(model: ModelSpec) -> int:
    return sum(layer_token_bytes(layer.attention, "bfloat16", "auto") for layer in model.layers)
