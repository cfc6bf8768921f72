"""`format` of JSON Schema as patterns that validators of all kinds accept. Pure."""

from typing import NamedTuple


class Format(NamedTuple):
    """A `format` of JSON Schema that answers are held to. pattern: of whole texts, in llguidance's
    syntax. most: characters, at most.
    """

    pattern: str
    most: int | None = None


_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,6}})?(?:Z|[+\-]{_CLOCK})"
_OF_DAY = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DURATION = (
    "P(?:(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
    f"(?:{_OF_DAY})?|{_OF_DAY}|[0-9]+W)"
)
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!\#$%&'*+\-\/=?\^_`{|}\~]+"
_BYTE = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = rf"{_BYTE}(?:\.{_BYTE}){{3}}"
_HEX = "[0-9a-fA-F]"
_GROUP = f"{_HEX}{{1,4}}"
_IPV6 = (
    f"(?:(?:{_GROUP}:){{7}}{_GROUP}|"
    + "|".join(
        f"(?:{_GROUP}(?::{_GROUP}){{0,{before - 1}}})?::{after}" if before else f"::{after}"
        for before, after in [
            *((7 - n, f"{_GROUP}(?::{_GROUP}){{{n - 1}}}") for n in range(1, 8)),
            (7, ""),
        ]
    )
    + ")"
)
_UUID = "-".join(f"{_HEX}{{{count}}}" for count in (8, 4, 4, 4, 12))
_PLAIN = r"a-zA-Z0-9\-._\~!$&'()*+,;="
_CODED = f"%{_HEX}{{2}}"
_PATH = f"(?:[{_PLAIN}:@]|{_CODED})"
_URI = (
    r"[a-zA-Z][a-zA-Z0-9+\-.]*:(?:"
    rf"\/\/(?:(?:[{_PLAIN}:]|{_CODED})*@)?(?:[{_PLAIN}]|{_CODED})*(?::[0-9]{{0,5}})?(?:\/{_PATH}*)*"
    rf"|\/(?:{_PATH}+(?:\/{_PATH}*)*)?|{_PATH}+(?:\/{_PATH}*)*)"
    rf"(?:\?(?:{_PATH}|[\/?])*)?(?:\#(?:{_PATH}|[\/?])*)?"
)

FORMATS = {
    "date": Format(_DATE),
    "time": Format(_TIME),
    "date-time": Format(f"{_DATE}T{_TIME}"),
    "duration": Format(_DURATION),
    "email": Format(rf"{_ATOM}(?:\.{_ATOM})*@{_HOST}"),
    "hostname": Format(_HOST, most=253),
    "ipv4": Format(_IPV4),
    "ipv6": Format(_IPV6),
    "uuid": Format(_UUID),
    "uri": Format(_URI),
}
