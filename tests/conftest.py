"""Settings that must stand before any test module is imported."""

import os
from pathlib import Path

# Triton reads this when it is first imported: without a GPU its kernels run under the interpreter.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")
