"""The check that this machine can start a router's helpers."""

from prometheus_client import Gauge

from loraplex.adapters.helpers.helper import start_problem

HELPERS = {
    "grammar_checker": "loraplex.adapters.grammar.trial_process",
    "template_renderer": "loraplex.router.text.template_worker",
}


def check_helpers(broken: Gauge) -> None:
    """Checks that helper processes can start. 1 or 0 for each; the log has the reasons."""
    for name, module in HELPERS.items():
        broken.labels(name).set(start_problem(module) is not None)
