"""References to adapters: their grammar, parsed and written. Pure."""

import re
from typing import Literal
from urllib.parse import quote, unquote

import msgspec

from loraplex.adapters.errors import AdapterError

RefSource = Literal["hub", "local", "s3", "https", "modelscope", "upload", "alias"]

MODELSCOPE_ENDPOINT = "https://modelscope.cn"
MAX_REF_CHARS = 1024
MAX_TOKEN_CHARS = 4096

_MAX_NAME = 96
_WORD = rf"[A-Za-z0-9][A-Za-z0-9._-]{{0,{_MAX_NAME - 1}}}"
_PLAIN = "A-Za-z0-9._+=,~-"
_SEGMENT = rf"[{_PLAIN}]{{1,255}}"
_QUOTED = rf"(?:[{_PLAIN}]|%[0-9A-F]{{2}}){{1,255}}"
_HOST = r"[a-z0-9](?:[a-z0-9.-]{0,251}[a-z0-9])?(?::[1-9][0-9]{0,4})?"
_BUCKET = r"[a-z0-9][a-z0-9.-]{2,62}"
_NAMES: dict[RefSource, re.Pattern[str]] = {
    "alias": re.compile(rf"{_WORD}(?:/{_WORD})?"),
    "hub": re.compile(rf"{_WORD}(?:/{_WORD}(?:/{_SEGMENT})*)?"),
    "local": re.compile(rf"/?{_QUOTED}(?:/{_QUOTED})*"),
    "s3": re.compile(rf"{_BUCKET}(?:/{_SEGMENT})+"),
    "https": re.compile(rf"{_HOST}(?:/{_SEGMENT})+"),
    "modelscope": re.compile(rf"{_WORD}/{_WORD}"),
    "upload": re.compile(r"[0-9a-f]{64}"),
}
# Sources whose names others write as URLs, with `//` before and `/` after.
_URLS = ("s3", "https")
_REVISION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,127}")
_TOKEN = re.compile(rf"[!-~]{{1,{MAX_TOKEN_CHARS}}}")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_VERSION = re.compile(r"[1-9][0-9]{0,8}")
_GIT = "a branch, tag or commit"
_REVISIONS: dict[RefSource, str] = {"hub": _GIT, "modelscope": _GIT, "alias": "a version's number"}
# Between a revision of ModelScope and a fingerprint: no name of Git's has it.
_PINNED = "~"
_MODELSCOPE_BRANCH = "master"
_EXPECTED = (
    "hub:org/name, hub:org/name/folder@revision, local:path, s3:bucket/prefix, https://host/path, "
    "modelscope:owner/name, upload:digest, or the name of a registered adapter"
)


class AdapterRef(msgspec.Struct, frozen=True):
    """A parsed reference. It names an adapter; it never identifies one (the digest does).

    source: `alias` is a name that the operator registered; `upload` was sent to a router.
    name: `org/name` or `org/name/folder` for `hub`, `bucket/prefix` for `s3`, `host[:port]/path`
        for `https`, `owner/name` for `modelscope`. For `local` a path; characters other than
        A-Za-z0-9._+=,~- are written as in URLs (`my%20adapter`). For `upload` the digest of files.
    revision: number of a version for `alias`; branch, tag or commit for `hub`; fingerprint of the
        folder for the others; both for `modelscope` (`master~<fingerprint>`); None = the default
        branch, or whatever the folder holds now.
    """

    source: RefSource
    name: str
    revision: str | None = None


def parse_ref(text: str, default_source: RefSource = "hub") -> AdapterRef:
    """The reference that `text` spells.

    `source:name[@revision]` is explicit. Without a source, `org/name` belongs to `default_source`,
    and a bare name is an alias, or a folder when `default_source` is `local`. A folder within a
    repository of the Hub needs `hub:`.
    Raises AdapterError `bad_ref`.
    """
    if len(text) > MAX_REF_CHARS:
        raise _bad_ref(text, f"longer than {MAX_REF_CHARS} characters")
    prefix, colon, rest = text.partition(":")
    source, body = _explicit(text, prefix, rest) if colon else _implied(text, default_source)
    name, at, revision = body.partition("@")
    if source in _URLS:
        name = name.removesuffix("/")
    if not _NAMES[source].fullmatch(name) or not _well_formed(source, name):
        raise _bad_ref(text, _fault(source, name))
    if source == "hub" and not colon and hub_place(name)[1]:
        raise _bad_ref(text, f"a folder within a repository is written hub:{name}")
    if at and not _is_revision(source, revision):
        expected = _REVISIONS.get(source, "a fingerprint of 40 digits")
        raise _bad_ref(text, f"what follows '@' is not {expected}")
    return AdapterRef(source, name, revision if at else None)


def format_ref(ref: AdapterRef) -> str:
    """The one spelling that `parse_ref` reads back as this reference, whatever the default."""
    revision = f"@{ref.revision}" if ref.revision is not None else ""
    return f"{ref.source}:{ref.name}{revision}"


def local_name(path: str) -> str:
    """Spells a folder as the name of a `local` reference."""
    return quote(path, safe="/._+=,~-", errors="surrogateescape")


def path_ref(path: str) -> str:
    """Spells a path, which may be quoted already, as the reference of a folder."""
    return f"local:{local_name(path_of_local(path).rstrip('/'))}"


def path_of_local(name: str) -> str:
    """The path that the name of a `local` reference stands for."""
    return unquote(name, errors="surrogateescape")


def hub_place(name: str) -> tuple[str, str]:
    """The repository, and the folder within it ("" = its top), of the name of a `hub` reference."""
    owner, _, rest = name.partition("/")
    repository, _, folder = rest.partition("/")
    return f"{owner}/{repository}" if repository else owner, folder


def shown_name(ref: AdapterRef) -> str:
    """Shortens a reference for answers: callers never learn a path, bucket or host."""
    is_public = ref.source in ("hub", "modelscope", "upload", "alias")
    return format_ref(ref) if is_public else ref.name.rpartition("/")[2]


def shown_place(ref: AdapterRef) -> str:
    """Shortens the place of a folder for answers: without a commit or a path."""
    if ref.source == "local":
        return f"local:{'.../' if '/' in ref.name else ''}{shown_name(ref)}"
    return format_ref(msgspec.structs.replace(ref, revision=None))


def is_name(text: str) -> bool:
    """Whether an adapter could be registered under it."""
    source: RefSource = "hub" if "/" in text else "alias"
    is_short, fits = len(text) <= _MAX_NAME, _NAMES["alias"].fullmatch(text)
    return is_short and bool(fits) and _well_formed(source, text)


def name_fault(text: str) -> str | None:
    """Why no adapter can be registered under it, or None: the first character at fault is named."""
    if is_name(text):
        return None
    allowed = "a-z, A-Z, 0-9, '.', '_', '-' and one '/' are"
    for character in text:
        if not re.fullmatch("[A-Za-z0-9._/-]", character):
            return f"{ascii(character)} is not allowed in a name: {allowed}"
    if not text or not text[0].isalnum():
        return f"a name begins with a letter or digit; got {text[:1]!r}"
    if ".." in text or len(text) > _MAX_NAME:
        return f"a name has no '..' and at most {_MAX_NAME} characters"
    return "a name with a '/' is written as the Hub writes owner/name"


def split_version(text: str) -> tuple[str, int | None]:
    """A registered name, and the number of the version that follows it as `@17`; None = none."""
    name, _, version = text.partition("@")
    return (name, int(version)) if _VERSION.fullmatch(version) else (text, None)


def is_owner(text: str) -> bool:
    """Whether the Hub could have an owner of this name."""
    return bool(re.fullmatch(_WORD, text))


def is_bucket(text: str) -> bool:
    """Whether a reference could name this bucket of S3."""
    return bool(re.fullmatch(_BUCKET, text))


def is_pinned(ref: AdapterRef) -> bool:
    """Whether it names one content for ever: a commit, an upload, or a folder's fingerprint."""
    if ref.source == "upload":
        return True
    if ref.revision is None:
        return False
    return bool(_COMMIT.fullmatch(pin_of(ref).fingerprint or ""))


class Pin(msgspec.Struct, frozen=True):
    """A revision's parts. label: a branch, tag or commit of ModelScope; "" elsewhere.
    fingerprint: of the content, None = any."""

    label: str
    fingerprint: str | None

    def of(self, fingerprint: str) -> str:
        """The revision with this fingerprint."""
        return f"{self.label}{_PINNED}{fingerprint}" if self.label else fingerprint


def pin_of(ref: AdapterRef) -> Pin:
    if ref.source != "modelscope":
        return Pin("", ref.revision)
    label, _, fingerprint = (ref.revision or _MODELSCOPE_BRANCH).partition(_PINNED)
    return Pin(label, fingerprint or None)


def check_token(token: str | None) -> None:
    """Whether a source could be shown this credential at all. Raises AdapterError; never quotes."""
    if token is not None and not _TOKEN.fullmatch(token):
        message = f"a token has 1 to {MAX_TOKEN_CHARS} printable ASCII characters"
        raise AdapterError("unauthorized", message)


def _explicit(text: str, prefix: str, rest: str) -> tuple[RefSource, str]:
    for source in _NAMES:
        if prefix == source:
            return source, rest.removeprefix("//") if source in _URLS else rest
    raise _bad_ref(text, f"unknown source; known: {', '.join(_NAMES)}")


def _implied(text: str, default_source: RefSource) -> tuple[RefSource, str]:
    name, _, version = text.partition("@")
    is_alias = "/" not in name and (default_source != "local" or _VERSION.fullmatch(version))
    return "alias" if is_alias else default_source, text


def _well_formed(source: RefSource, name: str) -> bool:
    if not _safe_path(name.removeprefix("/")):
        return False
    if source == "local":  # one spelling: what needs no quoting has none
        path = path_of_local(name)
        return path.isprintable() and local_name(path) == name
    return source != "hub" or not any(
        "--" in part or part.endswith((".", "-", ".git")) for part in hub_place(name)[0].split("/")
    )


def _is_revision(source: RefSource, text: str) -> bool:
    if source == "modelscope":
        text, pinned, fingerprint = text.partition(_PINNED)
        if pinned and not _COMMIT.fullmatch(fingerprint):
            return False
    if source in ("hub", "modelscope"):
        return bool(_REVISION.fullmatch(text)) and _safe_path(text)
    if source == "upload":
        return False
    return bool((_VERSION if source == "alias" else _COMMIT).fullmatch(text))


def _safe_path(text: str) -> bool:
    """Whether no part is empty or `.`, and none has `..` in it, as Git also demands."""
    return ".." not in text and all(part not in ("", ".") for part in text.split("/"))


def _fault(source: RefSource, name: str) -> str:
    """Explains why this is no name of the source."""
    bucket, _, prefix = name.partition("/")
    if source == "s3" and bucket:
        if not is_bucket(bucket):
            return f"{ascii(bucket[:80])} is no bucket: 3 to 63 of a-z, 0-9, '.' and '-'"
        if not prefix:
            return "there is no prefix after the bucket"
    if source == "local":
        return (
            f"a folder's path has {_PLAIN} between its '/'; other characters are written as "
            "in URLs (%20); no part is empty or '.', none has '..'"
        )
    return f"not the name of an adapter for source {source!r}"


def _bad_ref(text: str, reason: str) -> AdapterError:
    shown = ascii(text[:80]) + ("…" if len(text) > 80 else "")
    return AdapterError(
        "bad_ref", f"bad adapter reference {shown}: {reason}. Expected {_EXPECTED}."
    )
