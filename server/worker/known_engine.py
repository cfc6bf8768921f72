"""The engine as its worker knows it: what the last step reported, and the way to send frames."""

from loraplex.server.engine.begun import BegunSequences
from loraplex.server.engine.messages import EngineReady, EngineStats, StepOutput, ToEngine
from loraplex.server.protocol import TierState
from loraplex.server.worker.process.engine_supervisor import EngineSupervisor


class KnownEngine:
    """Implements `EngineView`. resident: digests on the device. stats: of the last step. begun: as
    the engine writes it.
    """

    def __init__(self, supervisor: EngineSupervisor, begun: BegunSequences) -> None:
        self._supervisor = supervisor
        self.begun = begun
        self.stats = EngineStats()
        self.resident: frozenset[str] = frozenset()

    @property
    def engine_is_up(self) -> bool:
        return self._supervisor.ready

    def device_state(self, digest: str) -> TierState:
        if digest in self.resident:
            return "ready"
        return "loading" if digest in self.stats.loading else "absent"

    def to_engine(self, frame: ToEngine) -> None:
        """Send a frame to the present engine. Without one the frame is lost."""
        self._supervisor.send(frame)

    def started(self, ready: EngineReady) -> None:
        self.stats = EngineStats(free_pages=ready.total_pages)

    def stepped(self, output: StepOutput) -> None:
        self.stats = output.stats
        if output.resident is not None:
            self.resident = frozenset(output.resident)

    def lost(self) -> None:
        self.stats, self.resident = EngineStats(), frozenset()
        self.begun.clear()
