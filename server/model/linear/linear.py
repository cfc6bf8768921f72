"""A matrix of the base, as it is stored on the device."""

from server.model.linear.dense import DenseLinear
from server.model.linear.quantised import QuantisedLinear

Linear = DenseLinear | QuantisedLinear
