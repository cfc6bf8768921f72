"""A matrix of the base, as it is stored on the device."""

from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.linear.quantised import QuantisedLinear
from loraplex.server.model.linear.rounded import RoundedLinear

Linear = DenseLinear | QuantisedLinear | RoundedLinear
