"""Work of this router that is no live answer, for who watches the fleet."""

from typing import get_args

from loraplex.router.api.admin.fleet import BatchesObject, WorkObject
from loraplex.router.batches.desk import BatchDesk
from loraplex.router.call import VectorUse
from loraplex.router.telemetry.metrics import RouterMetrics


def work_of(metrics: RouterMetrics, desk: BatchDesk | None) -> WorkObject:
    (family,) = metrics.vectors.collect()
    counts = {
        sample.labels["use"]: int(sample.value)
        for sample in family.samples
        if sample.name.endswith("_total")
    }
    vectors = {use: counts.get(use, 0) for use in get_args(VectorUse)}
    return WorkObject(vectors, None if desk is None else _batches(desk))


def _batches(desk: BatchDesk) -> BatchesObject:
    keeper = desk.keeper
    return BatchesObject(
        running=keeper.running,
        rows=keeper.rows.running,
        rows_limit=keeper.rows.most,
        files=keeper.stored.files,
        bytes=keeper.stored.nbytes,
    )
