"""lorax-client's classes."""

import lorax

from tests.e2e.clients.asking import check, run

LABELS = {"good", "bad", "odd"}


def of_lorax(url: str) -> None:
    client = lorax.Client(url, timeout=240)
    found = client.classify("a text").entities
    check({one["label"] for one in found} == LABELS, f"labels: {found}")
    both = client.classify_batch(["a text", "another"])
    check(len(both) == 2, "batch")
    first = [one["label"] for one in both[0].entities]
    check(first == [one["label"] for one in found], "the same text")


if __name__ == "__main__":
    run(of_lorax)
