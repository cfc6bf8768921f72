"""The release's version."""

from loraplex.adapters.common.extras import installed

VERSION = installed("loraplex") or "0 (from a checkout)"
