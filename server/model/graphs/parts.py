"""The parts that a set of operations is built from, and the set that is built."""

from dataclasses import dataclass
from typing import Any

from loraplex.server.engine.executor import ExecutorLimits, MemoryLine
from loraplex.server.model.decoder import Decoder
from loraplex.server.model.devices.group import Group
from loraplex.server.model.lora.lora import AdapterTable
from loraplex.server.model.ops.group_ops import GroupOps
from loraplex.server.model.ops.memory import LOGITS_ROWS
from loraplex.server.model.ops.ops import KVCache
from loraplex.server.model.ops.row_states import RowStates
from loraplex.server.model.routed_experts import ChosenExperts
from loraplex.server.model.sampling.sampler import Draws
from loraplex.server.model.sampling.sampling import RowSampling
from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.steps.rows import Rows
from loraplex.server.model.tower.tower import PictureStore
from loraplex.server.model.weights import ModelWeights


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of a set of ops, all on one device. model: the device's part of the whole.

    The device shares the whole with its group. memory: what fills the device. dora_graphs,
    batch_invariant: see WorkerConfig. pictures: None = the model reads none.
    """

    whole: ModelSpec
    group: Group
    model: ModelSpec
    weights: ModelWeights
    cache: KVCache
    states: RowStates
    table: AdapterTable
    rows: Rows
    parameters: RowSampling
    limits: ExecutorLimits
    memory: tuple[MemoryLine, ...]
    dora_graphs: bool
    pictures: PictureStore | None = None
    batch_invariant: bool = False

    @property
    def rows_at_once(self) -> int:
        """How many rows' tokens are drawn in torch at once."""
        return 1 if self.batch_invariant else LOGITS_ROWS

    def decoder(self, ops: Any, weights: ModelWeights | None = None) -> Decoder[Any, Any, Any]:
        """Make a decoder, for a group of devices where there is one. ops: of the device alone.
        weights: None = all of them.
        """
        if self.group.shard.count > 1:
            ops = GroupOps(self.whole, ops, self.group)
        return Decoder(self.model, weights or self.weights, self.table.sites, ops)


@dataclass(frozen=True, slots=True)
class Built:
    """Decoder, graphs and draws of an executor. graphs, token_graphs: DecodeGraphs and TokenGraphs,
    None where steps are computed as they come. row_sizes: numbers of rows, ascending, that those
    are padded to; none = they need not be. backend: for a person. chosen_experts: those of the
    latest step; None = the model has none.
    """

    decoder: Decoder[Any, Any, Any]
    draws: Draws
    graphs: Any
    token_graphs: Any
    row_sizes: tuple[int, ...]
    backend: str
    chosen_experts: ChosenExperts | None = None
