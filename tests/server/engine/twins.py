"""Two schedulers that get the same requests, one of them with drafts: their events say the same."""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule

from loraplex.server.protocol import GenerateRequest
from tests.server.engine.harness import Harness


def content(harness: Harness, key: int) -> dict[str, Any]:
    """What the events of a sequence say, however they are cut."""
    events = harness.events[key]
    return {
        "index": events[0].index,
        "tokens": harness.tokens(key),
        "logprobs": [p for e in events for p in e.logprobs or ()],
        "prompt_logprobs": events[0].prompt_logprobs,
        "ends": [(e.finish, e.error, e.message) for e in events if e.finish is not None],
    }


class TwinsMachine(RuleBasedStateMachine):
    """one: without drafts; many: with them. `begin` of a subclass makes both."""

    one: Harness
    many: Harness

    def __init__(self) -> None:
        super().__init__()
        self.keys: list[int] = []
        self.aborted: set[int] = set()

    def submit_to_both(self, request: GenerateRequest) -> None:
        key = self.many.submit(request)
        assert self.one.submit(request) == key
        self.keys.append(key)

    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        """Aborts come at other places of the two outputs, so one is a beginning of the other."""
        if self.keys:
            key = data.draw(st.sampled_from(self.keys))
            self.many.abort(key)
            self.one.abort(key)
            self.aborted.add(key)

    @rule(times=st.integers(1, 6))
    def cycles(self, times: int) -> None:
        for _ in range(times):
            self.many.cycle()
            self.one.cycle()

    def teardown(self) -> None:
        if not hasattr(self, "many"):
            return
        for harness in (self.one, self.many):
            harness.run()
            harness.assert_at_rest()
        for key in self.keys:
            one, many = content(self.one, key), content(self.many, key)
            if key in self.aborted:
                shorter = min(len(one["tokens"]), len(many["tokens"]))
                assert one["tokens"][:shorter] == many["tokens"][:shorter]
                assert len(many["ends"]) == 1
            else:
                assert many == one
