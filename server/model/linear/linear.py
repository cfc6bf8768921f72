"""A matrix of the base, as it is stored on the device."""

from loraplex.server.model.linear.dense import DenseLinear
from loraplex.server.model.linear.fp8 import Fp8Linear
from loraplex.server.model.linear.quantised import QuantisedLinear

Linear = DenseLinear | QuantisedLinear | Fp8Linear
