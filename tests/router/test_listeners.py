"""Ports that are shared, and ports that are not."""

import socket

import pytest

from router.listeners import listen, share, url_of


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_who_shares_a_port_gets_nothing_before_it_listens(host: str) -> None:
    with share(host, 0) as held:
        address = held.getsockname()[:2]
        assert url_of(held).endswith(f":{address[1]}")
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, 5)
        with share(*address) as serving:
            serving.listen()
            serving.settimeout(5)
            for _ in range(8):  # none of them waits at the socket that only holds the port
                with socket.create_connection(address, 5):
                    serving.accept()[0].close()


def test_a_port_that_others_listen_on_is_refused_to_who_does_not_share() -> None:
    with share("127.0.0.1", 0) as serving:
        serving.listen()
        with pytest.raises(OSError, match="in use"):
            listen(*serving.getsockname())
