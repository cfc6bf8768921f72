"""The certificate authorities that loraplex's TLS clients trust."""

import ssl

import certifi


def trusted_context() -> ssl.SSLContext:
    """A TLS context with the system's authorities (also `SSL_CERT_FILE`) and certifi's."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
