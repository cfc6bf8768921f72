"""Random loads on the scheduler under the certifying executor: nothing lost, mixed up or leaked."""

from typing import Any

import msgspec
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from loraplex.server.engine.scheduling.scheduler_config import SchedulerConfig
from loraplex.server.protocol import BACKGROUND_PRIORITY, GenerateRequest, TokenEvent, VectorParams
from tests.certifying.certificates import (
    ROOT_MARK,
    CertifyOptions,
    Mark,
    certified_output,
    certified_vector,
    next_mark,
)
from tests.server.engine.harness import Harness, limits, make_request

CLASSES = 3
ADAPTERS = st.sampled_from([None, None, "a", "b", "c", "d", "big", "huge"])
RUNS = {"a": (1, 1), "b": (1,), "c": (2,), "d": (1, 1, 1), "big": (3, 1, 1), "huge": (9,)}
PROMPTS = st.one_of(
    st.lists(st.integers(5, 9), min_size=1, max_size=6),
    # Long common beginnings, so that pages are shared.
    st.integers(1, 40).map(lambda n: [10 + i % 7 for i in range(n)]),
)
WISHES = st.fixed_dictionaries(
    {
        "prompt": PROMPTS,
        "max_tokens": st.integers(0, 24),
        "adapter": ADAPTERS,
        "adapter_scale": st.sampled_from([1.0, 1.0, 0.5, -2.0]),
        "priority": st.sampled_from([0, 1, BACKGROUND_PRIORITY]),
        "deadline_s": st.sampled_from([None, None, None, 0.05, 5.0]),
        "salt": st.sampled_from(["", "", "tenant"]),
        "tenant": st.sampled_from(["", "a", "b"]),
        "min_tokens": st.sampled_from([0, 0, 3]),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.sampled_from([None, None, 1]),
        "num_accepted": st.sampled_from([0, 0, 0, 1, 5]),
        "adapter_from": st.sampled_from([0, 0, 0, 3, 4, 9, 40, None]),
        "vector": st.sampled_from(
            [
                *[None] * 5,
                VectorParams(),
                VectorParams(pooling="mean"),
                VectorParams("scores"),
                VectorParams("logits", token_ids=(4, 9)),
            ]
        ),
    }
)
NO_ANSWER = {"max_tokens": 0, "prompt_logprobs": None, "num_accepted": 0}


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.requests: dict[int, GenerateRequest] = {}
        self.aborted: set[int] = set()
        self.orders = 0

    @initialize(
        depth=st.sampled_from([1, 2, 3]),
        sizes=st.fixed_dictionaries(
            {
                "num_pages": st.integers(8, 24),
                "adapter_slots": st.integers(1, 3),
                "max_rows": st.integers(1, 4),
                "max_step_tokens": st.integers(2, 20),
                "max_decodes": st.sampled_from([0, 0, 12]),
                "short_context": st.sampled_from([None, None, 1, 9, 24]),
                "page_windows": st.sampled_from(
                    [(None,), (None,), (None, 5), (None, 9, 9), (6,), (3, 12)]
                ),
                "has_states": st.sampled_from([False, False, True]),
                "num_snapshots": st.sampled_from([0, 1, 2, 6]),
                "host_pages": st.sampled_from([0, 2, 30]),
                "host_snapshots": st.sampled_from([0, 1, 12]),
                "disk_snapshots": st.sampled_from([0, 1, 20]),
                "disk_pages": st.sampled_from([0, 2, 60]),
            }
        ),
        bad_percent=st.sampled_from([0, 0, 30, 100]),
        eos_percent=st.sampled_from([0, 5, 30]),
        copy_polls=st.integers(1, 3),
        ending_polls=st.integers(0, 3),
    )
    def begin(
        self,
        depth: int,
        sizes: dict[str, int],
        eos_percent: int,
        copy_polls: int,
        ending_polls: int,
        bad_percent: int,
    ) -> None:
        if not sizes["has_states"]:
            sizes["num_snapshots"] = sizes["host_snapshots"] = 0
        engine = limits(**sizes, num_classes=CLASSES)
        self.options = CertifyOptions(
            engine.vocab_size,
            engine.eos_token_ids,
            eos_percent,
            copy_polls=copy_polls,
            ending_polls=ending_polls,
        )
        config = SchedulerConfig(max_waiting=12, max_loading=2, drain_after_s=0.05, max_draft=3)
        self.harness = Harness(
            engine,
            depth,
            config,
            self.options,
            auto_stage=False,
            right_percent=50,
            step_s=lambda plan: 1e-3 * (5 + plan.num_tokens),
        )
        self.harness.runs = dict(RUNS)
        pages = self.harness.executor.pages_below
        pages.polls, pages.bad_percent = copy_polls, bad_percent
        states = self.harness.executor.states_below
        states.polls, states.bad_percent = copy_polls, bad_percent

    @rule(wish=WISHES)
    def submit(self, wish: dict[str, Any]) -> None:
        wish = dict(wish)
        if wish["vector"] is not None:
            wish |= NO_ANSWER
        count = min(wish.pop("num_accepted"), wish["max_tokens"])
        wish["ignore_eos"] = wish["ignore_eos"] and not self.options.eos_percent
        begins = wish["adapter_from"]
        if begins is not None:
            begins = wish["adapter_from"] = min(begins, len(wish["prompt"]) - 1)
        request = make_request(**wish)
        accepted = certified_output(
            request.acting, wish["prompt"], count, self.options, wish["min_tokens"], begins
        )
        request = msgspec.structs.replace(request, accepted_ids=accepted)
        self.requests[self.harness.submit(request)] = request

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        key = data.draw(st.sampled_from(sorted(self.requests)))
        self.harness.abort(key)
        self.aborted.add(key)

    @precondition(lambda self: self.requests)
    @rule(data=st.data())
    def ask_again(self, data: st.DataObject) -> None:
        """The same prompt, whose pages the device may have lost."""
        request = self.requests[data.draw(st.sampled_from(sorted(self.requests)))]
        again = msgspec.structs.replace(request, deadline_s=None)
        self.requests[self.harness.submit(again)] = again

    @precondition(lambda self: self.harness.needed)
    @rule(data=st.data(), found=st.sampled_from([True, True, True, False]))
    def answer(self, data: st.DataObject, found: bool) -> None:
        digest = data.draw(st.sampled_from(self.harness.needed))
        if found:
            self.harness.stage(digest)
        else:
            self.harness.miss(digest)

    @rule(digest=st.sampled_from([*RUNS, "unheard"]))
    def push(self, digest: str) -> None:
        """A slab that may not have been asked for; the worker hands none over twice."""
        if digest not in self.harness.held:
            self.harness.stage(digest)

    @rule(digest=st.sampled_from([*RUNS, "unheard"]), order=st.sampled_from(["preload", "condemn"]))
    def order(self, digest: str, order: str) -> None:
        loads = self.harness.scheduler.loads
        give = loads.preload if order == "preload" else loads.condemn
        give(self.orders, digest)
        self.orders += 1

    @rule(pins=st.sets(st.sampled_from(sorted(RUNS)), max_size=1))
    def pin(self, pins: set[str]) -> None:
        self.harness.scheduler.loads.pin_only(pins)

    @rule(times=st.integers(1, 6))
    def cycles(self, times: int) -> None:
        for _ in range(times):
            self.harness.now += 0.01
            self.harness.cycle()

    def teardown(self) -> None:
        if not hasattr(self, "harness"):
            return
        self.harness.auto_stage = True
        pinned = [d for d in self.harness.scheduler.arena.pins if self.is_ready(d)]
        self.harness.run()
        assert all(self.is_ready(digest) for digest in pinned), "a pinned adapter was evicted"
        self.harness.assert_at_rest()
        answered = sorted(settled.order for settled in self.harness.settled)
        assert answered == list(range(self.orders)), "each order is answered once"
        for key, request in self.requests.items():
            self.check_answer(key, request)

    def is_ready(self, digest: str) -> bool:
        return self.harness.scheduler.arena.stage(digest) == "ready"

    def check_answer(self, key: int, request: GenerateRequest) -> None:
        harness = self.harness
        last = harness.last(key)
        sampling = request.sampling
        limit = min(sampling.max_tokens, harness.limits.max_context - len(request.prompt_ids))
        origin = (request.acting, request.prompt_ids, limit, self.options)
        whole = certified_output(*origin, sampling.min_tokens, request.adapter_from)
        tokens = request.accepted_ids + harness.tokens(key)
        if last.finish in ("stop", "length"):
            assert tokens == whole
            assert last.finish == ("stop" if whole and whole[-1] in (2, 3) else "length")
        else:
            assert tokens == whole[: len(tokens)]
            assert last.finish == ("abort" if last.error is None else "error")
            assert last.finish == "error" or key in self.aborted
            assert last.error != "internal"
            assert last.error != "deadline" or request.deadline_s is not None
        self.check_vector(request, last)
        if last.finish != "error" and harness.tokens(key) and not request.accepted_ids:
            scored = harness.events[key][0].prompt_logprobs
            asked = sampling.prompt_logprobs is not None
            assert (scored is not None) == asked
            assert [p.token_id for p in scored or ()] == (request.prompt_ids if asked else [])

    def check_vector(self, request: GenerateRequest, last: TokenEvent) -> None:
        """Of the whole prompt, whatever of it was cached, cut or computed twice."""
        if request.vector is None or last.finish in ("abort", "error"):
            assert last.vector is None
            return
        begins, mark, marks = request.adapter_from, ROOT_MARK, list[Mark]()
        for position, token_id in enumerate(request.prompt_ids):
            acts = begins is not None and position >= begins
            mark = next_mark(mark, token_id, request.acting if acts else None)
            marks.append(mark)
        assert last.vector == certified_vector(marks, request.vector, CLASSES)


SchedulerMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40)
TestScheduler = SchedulerMachine.TestCase
