"""The grammar of references."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.ref import (
    AdapterRef,
    RefSource,
    format_ref,
    is_name,
    is_pinned,
    name_fault,
    parse_ref,
    path_ref,
)
from tests.adapters.refusals import refusal

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("text", "default", "expected"),
    [
        ("org/name", "hub", AdapterRef("hub", "org/name")),
        ("hub:org/name@main", "local", AdapterRef("hub", "org/name", "main")),
        ("hub:gpt2", "hub", AdapterRef("hub", "gpt2")),
        ("hub:org/name/checkpoint-500", "hub", AdapterRef("hub", "org/name/checkpoint-500")),
        ("hub:o/n/a--b/v1.git/c=d@v2", "local", AdapterRef("hub", "o/n/a--b/v1.git/c=d", "v2")),
        (f"hub:o/n/x@{COMMIT}", "s3", AdapterRef("hub", "o/n/x", COMMIT)),
        (f"org/name@{COMMIT}", "hub", AdapterRef("hub", "org/name", COMMIT)),
        ("hub:org/name@refs/pr/7", "hub", AdapterRef("hub", "org/name", "refs/pr/7")),
        ("pirate", "hub", AdapterRef("alias", "pirate")),
        ("alias:pirate", "hub", AdapterRef("alias", "pirate")),
        ("pirate", "local", AdapterRef("local", "pirate")),
        ("local:a/b_c", "hub", AdapterRef("local", "a/b_c")),
        ("local:my%20a/%C3%A4", "hub", AdapterRef("local", "my%20a/%C3%A4")),
        ("local:/srv/adapters/a", "hub", AdapterRef("local", "/srv/adapters/a")),
        ("/srv/adapters/a", "local", AdapterRef("local", "/srv/adapters/a")),
        ("s3:bucket/key/of", "hub", AdapterRef("s3", "bucket/key/of")),
        ("s3://bucket/key", "hub", AdapterRef("s3", "bucket/key")),
        ("s3://bucket/key/", "hub", AdapterRef("s3", "bucket/key")),
        ("bucket/key", "s3", AdapterRef("s3", "bucket/key")),
        (f"s3:bucket/key@{COMMIT}", "hub", AdapterRef("s3", "bucket/key", COMMIT)),
        ("https://host/x", "hub", AdapterRef("https", "host/x")),
        ("https://a.host:8443/x/y/", "local", AdapterRef("https", "a.host:8443/x/y")),
        (f"https:10.0.0.1/x@{COMMIT}", "hub", AdapterRef("https", "10.0.0.1/x", COMMIT)),
        ("modelscope:o/n", "hub", AdapterRef("modelscope", "o/n")),
        ("o/n@v1.0", "modelscope", AdapterRef("modelscope", "o/n", "v1.0")),
        ("pirate", "modelscope", AdapterRef("alias", "pirate")),
        (
            f"modelscope:o/n@a/b~{COMMIT}",
            "local",
            AdapterRef("modelscope", "o/n", f"a/b~{COMMIT}"),
        ),
        ("x" * 96, "hub", AdapterRef("alias", "x" * 96)),
    ],
)
def test_accepted(text: str, default: RefSource, expected: AdapterRef) -> None:
    assert parse_ref(text, default) == expected
    assert parse_ref(format_ref(expected)) == expected


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            " ",
            "/",
            ":",
            "@",
            "a b",
            "org/",
            "/name",
            "org//name",
            "modelscope:n",
            "modelscope:o/n/f",
            "modelscope:o/n@v1~0",
            f"modelscope:o/n@~{COMMIT}",
            "a/b/c",
            "..",
            "a/..",
            "../a",
        ),
        *("hub:org/name/", "hub:org/name//x", "hub:org/name/../x", "hub:org/name/a..b", "hub:o//x"),
        *("hub:org/name/.", "hub:org/name/a b", "hub:org/name/%41", "hub:org/name/x@", "a/b/c@v1"),
        *("hub:org/a--b/x", "hub:org/name./x", "hub:org/name/a\\b", "hub:o/n/" + "x" * 256),
        *("hub:../x", "hub:/org/name", "hub:org/name@", "hub:org/name@..", "hub:org/name@a b"),
        *(
            "hub:org/name@/x",
            "hub:org/name@a//b",
            "hub:org/name@@x",
            "org/name@x@y",
            "hub:",
            "hub:@x",
        ),
        *(
            "local:",
            "local:..",
            "local:../x",
            "local:a/../b",
            "local:a/./b",
            "local:a//b",
            "local:/",
        ),
        *("local:a%2Fb", "local:%2E%2E/x", "local:a%41", "local:a%0A", "local:a%FF", "local:a b"),
        *("local:a\\b", "local:a%2fb", "local:~\n", "local:a\x00", "local://host/x", "local:a/"),
        *("s3:", "s3:bucket", "s3://bucket", "s3:Bucket/key", "s3:bucket/../key", "s3:///key"),
        *("http://host/x", "file:///etc/passwd", "HUB:org/name", "ftp:x", "x:y"),
        *("https:", "https://", "https://host", "https://host/", "https:///x", "https://HOST/x"),
        *("https://u:p@host/x", "https://u@host/x", "https://host/x?a=b", "https://host/x#a"),
        *("https://host/../x", "https://a..b/x", "https://[::1]/x", "https://host:/x"),
        *("https://host:0/x", "https://host:123456/x", "https://host//x", "s3:bucket/key//"),
        *("https://host/x%2f", "https://-host/x", "https://host\\x/y", "s3:///bucket/key"),
        *("%2e%2e", "org%2fname", "org\\name", "name\n", "org/name\n", "org/name\r\n", "\tname"),
        *(
            "na\u2024me",
            "\uff0e\uff0e/x",
            "p\u0430y",
            "na\u202eme",
            "org\u2215name",
            "é",
            "😀",
            "\ud800",
        ),
        *(
            "hub:org/name.",
            "hub:org/name-",
            "hub:org/a--b",
            "hub:org/name.git",
            "-name",
            ".name",
            "_n",
        ),
        *(
            "x" * 97,
            "org/" + "x" * 97,
            "x" * 65536,
            "*",
            "org/*",
            "{0}",
            "%s",
            "$(id)",
            "a;b",
            "a|b",
        ),
        *(
            "alias:a/b/c",
            "alias:a@x",
            "pirate@v1",
            "local:pirate@main",
            "s3:bucket/prefix@v1",
            f"local:pirate@{'0' * 39}",
            "KEYS[1]",
            "'",
            '"',
            "<a>",
            "hub:org/name?x=1",
            "a#b",
        ),
    ],
)
def test_refused(text: str) -> None:
    with pytest.raises(AdapterError) as error:
        parse_ref(text)
    assert error.value.code == "bad_ref"
    assert error.value.message.isprintable()
    assert len(error.value.message) < 1500


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("a/b/c", "a folder within a repository is written hub:a/b/c."),
        ("s3:b/p", "'b' is no bucket: 3 to 63 of"),
        ("s3:Bucket/key", "'Bucket' is no bucket: 3 to 63 of"),
        ("s3:bucket", "no prefix after the bucket"),
        ("s3://bucket/", "no prefix after the bucket"),
    ],
)
def test_what_is_wrong_is_said(text: str, why: str) -> None:
    error = refusal(lambda: parse_ref(text))
    assert error is not None
    assert why in error.message


@given(st.text(max_size=40), st.sampled_from(("hub", "local", "s3", "https", "alias")))
def test_any_text_is_a_reference_or_bad_ref(text: str, default: RefSource) -> None:
    error = refusal(lambda: parse_ref(text, default))
    if error is not None:
        assert error.code == "bad_ref"
    else:
        ref = parse_ref(text, default)
        assert parse_ref(format_ref(ref)) == ref
        assert text.isascii()
        assert text.isprintable()


@given(st.from_regex(r"[A-Za-z0-9._:@/+ -]{0,12}", fullmatch=True) | st.text(max_size=120))
def test_a_name_is_what_spells_itself(text: str) -> None:
    source: RefSource = "hub" if "/" in text else "alias"
    named = refusal(lambda: parse_ref(text)) is None and parse_ref(text) == AdapterRef(source, text)
    assert is_name(text) == (named and len(text) <= 96)


@given(st.text(max_size=100) | st.text("aB3._-+", max_size=100))
def test_a_name_has_a_fault_or_is_one(text: str) -> None:
    assert (name_fault(text) is None) == is_name(text)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("a+b", "'+' is not allowed in a name: a-z, A-Z, 0-9, '.', '_', '-' and one '/' are"),
        ("caf\u00e9", "'\\xe9' is not allowed"),
        ("-a", "begins with a letter or digit; got '-'"),
        ("", "begins with a letter or digit; got ''"),
        ("a..b", "no '..'"),
        ("a" * 97, "at most 96 characters"),
        ("a/" + "b" * 95, "at most 96 characters"),
        ("a/b/c", "as the Hub writes owner/name"),
        ("org/", "as the Hub writes owner/name"),
        ("org/x.git", "as the Hub writes owner/name"),
    ],
)
def test_the_character_at_fault_is_named(name: str, why: str) -> None:
    assert why in (name_fault(name) or "")


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/srv/loras/sql/", "/srv/loras/sql"),
        ("/srv/my runs/ü@2", "/srv/my%20runs/%C3%BC%402"),
        ("/srv/my%20runs/a", "/srv/my%20runs/a"),
        ("/srv/100%", "/srv/100%25"),
    ],
)
def test_a_path_is_a_folder_however_it_is_written(path: str, name: str) -> None:
    assert parse_ref(path_ref(path)) == AdapterRef("local", name)


def test_pinned_means_a_commit_or_a_fingerprint() -> None:
    assert is_pinned(AdapterRef("hub", "o/n", COMMIT))
    assert not is_pinned(AdapterRef("hub", "o/n", "main"))
    assert not is_pinned(AdapterRef("hub", "o/n", COMMIT[:-1]))
    assert not is_pinned(AdapterRef("hub", "o/n"))
    assert is_pinned(AdapterRef("local", "x", COMMIT))
    assert not is_pinned(AdapterRef("local", "x"))
