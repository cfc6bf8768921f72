"""The certificate authorities that loraplex's TLS clients trust."""

import ssl

import certifi


def trusted_context() -> ssl.SSLContext:
    """The system's (`SSL_CERT_FILE` holds) and certifi's, for machines that have none."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
