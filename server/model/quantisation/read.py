"""From the table `quantization_config` to a Quantisation. Pure."""

from collections.abc import Callable
from types import MappingProxyType

from loraplex.server.model.quantisation.awq import read_awq
from loraplex.server.model.quantisation.bitsandbytes import read_bitsandbytes
from loraplex.server.model.quantisation.compressed_tensors import read_compressed_tensors
from loraplex.server.model.quantisation.fp8 import read_fbgemm, read_fp8
from loraplex.server.model.quantisation.gptq import read_gptq
from loraplex.server.model.quantisation.quantisation import Quantisation
from loraplex.server.model.quantisation.settings import Table

# By `quant_method`.
_METHODS: MappingProxyType[str, Callable[[Table], Quantisation]] = MappingProxyType(
    {
        "awq": read_awq,
        "bitsandbytes": read_bitsandbytes,
        "compressed-tensors": read_compressed_tensors,
        "fbgemm_fp8": read_fbgemm,
        "fp8": read_fp8,
        "gptq": read_gptq,
    }
)
READ = "FP8, AWQ, GPTQ, bitsandbytes and compressed-tensors (FP8, int4, int8)"


def read_quantisation(table: Table) -> Quantisation:
    """Raises ValueError, with the scheme's name and those that are read where it is another."""
    method = table.get("quant_method") or table.get("quant_algo") or "unnamed"
    read = _METHODS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ValueError(
            f"quantised weights ({method!r:.100}) are not served; of quantised weights {READ} are"
            " read: serve one of these or the original"
        )
    try:
        return read(table)
    except ValueError as error:
        raise ValueError(f"{method}: {error}") from None
