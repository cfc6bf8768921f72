"""The parts of files and batches, from a router's options."""

from pathlib import Path

from loraplex.router.batches.desk import BatchDesk
from loraplex.router.batches.folder import BatchFolder, Claims, FleetView
from loraplex.router.batches.inside import InsideDoor
from loraplex.router.batches.keeper import BatchKeeper
from loraplex.router.batches.row_shares import RowShares
from loraplex.router.batches.run import BatchParts
from loraplex.router.config import RouterConfig
from loraplex.router.files.store import FileStore
from loraplex.router.files.stored_file import StorageLimits
from loraplex.router.files.upload import Uploads
from loraplex.router.generation.dispatcher import Dispatcher
from loraplex.router.lines.lines import LineRules
from loraplex.router.shared.sharing import Sharing
from loraplex.router.telemetry.metrics import RouterMetrics
from loraplex.router.tenancy.tenancy import Tenancy

# What a line has around its body.
_AROUND_BYTES = 64 << 10
_STOP_S = 5.0


def make_batches(
    config: RouterConfig,
    folder: Path,
    sharing: Sharing,
    tenancy: Tenancy,
    dispatcher: Dispatcher,
    metrics: RouterMetrics,
    router_id: str,
) -> BatchDesk:
    """Makes the part of the router that runs batches. folder: --files-dir."""

    def room_of(tenant: str) -> StorageLimits:
        owner = tenancy.keyring.tenant(tenant)
        return StorageLimits(
            owner.files or config.files.tenant_count,
            owner.file_bytes or config.files.tenant_bytes,
        )

    root, door = folder.expanduser(), InsideDoor()
    store = FileStore(root)
    batches = BatchFolder(root, store)
    parts = BatchParts(
        folder=batches,
        store=store,
        rows=RowShares(config.batch.rows, config.batch.live_rows),
        rules=LineRules(
            max_bytes=config.max_body_bytes + _AROUND_BYTES, max_lines=config.batch.max_lines
        ),
        metrics=metrics,
        ask=door.ask,
        voucher=tenancy.vouchers.header,
        room_of=room_of,
    )
    keeper = BatchKeeper(
        parts=parts,
        claims=Claims(sharing.store, batches, router_id),
        view=FleetView(sharing.store, router_id, sharing.link is not None),
        live=lambda: dispatcher.live_at,
        draining=lambda: dispatcher.draining,
        stop_s=min(_STOP_S, config.drain_timeout_s),
    )
    files = config.files
    return BatchDesk(
        store=store,
        folder=batches,
        keeper=keeper,
        uploads=Uploads(store, files, config.body_timeout_s),
        room_of=room_of,
        expiry_s=files.expire_s,
        door=door,
    )
