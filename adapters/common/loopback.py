"""Whether a host is this machine alone. Pure."""

import ipaddress


def is_loopback(host: str) -> bool:
    """Whether a host is this machine's loopback. host: an address or a name; names but `localhost`
    may be anything, so they are not.
    """
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
