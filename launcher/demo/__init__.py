"""A small trained base model with LoRA adapters, so that the server runs with nothing to fetch."""

from __future__ import annotations

from pathlib import Path

HERE = Path(__file__).parent
BASE_NAME = "loraplex/demo"

# Messages to try: each adapter does something else with the same one.
EXAMPLES = (
    "Hi, I'm Ana Silva. I'd like to order three oak shelves, delivered to Porto please.",
    "Hello, my name is Marco Rossi. The blue ceramic mug from order 48213 arrived broken. "
    "I am very disappointed!",
    "Please cancel order #10442 for two linen aprons, it's urgent. Thanks, Ines Novak",
)


def model_path() -> Path:
    """The base model's folder."""
    return HERE / "model"


def adapter_paths(folder: Path | None = None) -> dict[str, Path]:
    """Each adapter's folder by name, in the package or in a folder laid out like it."""
    adapters = (folder or HERE) / "adapters"
    return {
        path.parent.name: path.parent for path in sorted(adapters.glob("*/adapter_config.json"))
    }
