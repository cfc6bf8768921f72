"""`loraplex info MODEL`: what a base model is, or the sentence that a worker refuses it with."""

import msgspec

from launcher.demo import model_path
from server.model.spec import ModelSpec
from server.worker.process.model_source import check_model


class ModelFacts(msgspec.Struct, frozen=True):
    """A model that can be served. max_context: tokens. dtype: of its weights."""

    model: str
    family: str
    layers: int
    hidden_size: int
    vocab_size: int
    max_context: int
    dtype: str

    def written(self, *, for_programs: bool) -> str:
        if for_programs:
            return msgspec.json.format(msgspec.json.encode(self)).decode() + "\n"
        return (
            f"{self.model} can be served\n"
            f"  family      {self.family}\n"
            f"  layers      {self.layers}, of {self.hidden_size:,} features\n"
            f"  vocabulary  {self.vocab_size:,} tokens\n"
            f"  context     {self.max_context:,} tokens\n"
            f"  dtype       {self.dtype}\n"
        )


def describe(model: str, revision: str | None) -> ModelFacts:
    """Of a model of the Hub only small files are fetched. Raises ModelError, CheckpointError."""
    config: ModelSpec = check_model(str(model_path()) if model == "demo" else model, revision)
    return ModelFacts(
        model=model,
        family=config.family,
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=config.max_context,
        dtype=config.dtype,
    )
