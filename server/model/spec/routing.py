"""The form in which the experts of a model's tokens are reported. Pure."""

from loraplex.server.model.spec.model_spec import ModelSpec
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.protocol import RoutingForm


def routing_form(model: ModelSpec) -> RoutingForm | None:
    """None where no layer has experts, or layers choose unlike numbers of them."""
    of_layers = [
        [feed for feed in layer.feed_forwards if isinstance(feed, MoeSpec)]
        for layer in model.layers
    ]
    specs = [spec for layer in of_layers for spec in layer]
    if len({spec.top_k for spec in specs}) != 1 or any(len(layer) > 1 for layer in of_layers):
        return None
    is_small = all(spec.experts <= 256 for spec in specs)
    return RoutingForm(model.num_layers, specs[0].top_k, 1 if is_small else 2)
