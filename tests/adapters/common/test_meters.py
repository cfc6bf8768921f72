"""Families: there from the start, read at a scrape, with exemplars for those who ask for them."""

import asyncio

from prometheus_client import CollectorRegistry
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as plain

from loraplex.adapters.common.meters import Meters, watch_loop_lag

OPENMETRICS = "application/openmetrics-text; version=1.0.0"


def meters() -> Meters:
    return Meters(CollectorRegistry(), "t_")


def test_listed_labels_are_there_at_zero() -> None:
    made = meters()
    made.counter("c", "Counts", {"a": ("x", "y"), "b": ("z",)})
    made.histogram("h", "Times", (1.0, 2.0), {"a": ("x",)})
    text, _ = made.render("")
    samples = {
        (s.name, *s.labels.values()): s.value for f in plain(text.decode()) for s in f.samples
    }
    assert samples["t_c_total", "x", "z"] == samples["t_c_total", "y", "z"] == 0
    assert samples["t_h_count", "x"] == 0
    assert not any("created" in key[0] for key in samples)


def test_open_labels_come_as_they_go() -> None:
    made = meters()
    made.counter("c", "Counts", {"a": ()})
    rows = [(("one",), 1.0)]
    made.rows("g", "gauge", "Reads", {"w": ()}, lambda: rows)
    made.rows("r", "counter", "Reads", {"w": ()}, lambda: rows)
    text, _ = made.render("")
    assert 't_g{w="one"} 1.0' in text.decode()
    assert 't_r_total{w="one"} 1.0' in text.decode()
    assert "t_c_total{" not in text.decode()
    rows.clear()
    assert 'w="one"' not in made.render("")[0].decode()


def test_what_is_declared_is_what_is_shown() -> None:
    made = meters()
    made.counter("c", "Counts")
    made.gauge("g", "Is", {"a": ("x",)})
    made.watch("w", "Reads", lambda: 3.0)
    shown = {f.name for f in openmetrics(made.render(OPENMETRICS)[0].decode())}
    assert shown == {d.name.removesuffix("_total") for d in made.declared}
    assert [d.kind for d in made.declared] == ["counter", "gauge", "gauge"]


def test_exemplars_are_for_openmetrics_alone() -> None:
    made = meters()
    made.histogram("h", "Times", (1.0,)).observe(0.5, {"trace_id": "abc"})
    text, content_type = made.render(OPENMETRICS)
    assert content_type.startswith("application/openmetrics-text")
    (family,) = openmetrics(text.decode())
    assert [s.exemplar.labels for s in family.samples if s.exemplar] == [{"trace_id": "abc"}]
    text, content_type = made.render("text/plain")
    assert content_type.startswith("text/plain")
    assert "abc" not in text.decode()


async def test_a_busy_event_loop_is_reported() -> None:
    seen: asyncio.Queue[float] = asyncio.Queue()
    task = asyncio.create_task(watch_loop_lag(seen.put_nowait))
    assert await asyncio.wait_for(seen.get(), 240) >= 0
    task.cancel()
