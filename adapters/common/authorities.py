"""The certificate authorities that loraplex's TLS clients trust."""

import ssl

import certifi


def trusted_context() -> ssl.SSLContext:
    """Makes a TLS context with the system's authorities (`SSL_CERT_FILE` holds) and certifi's, for
    machines that have none.
    """
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context
