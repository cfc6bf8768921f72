"""Whose a name is: what each caller means by it, and that nobody ever gets another tenant's."""

import asyncio
import time
from collections.abc import Callable, Iterable
from functools import partial

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.errors import AdapterError
from loraplex.adapters.manifest import AdapterManifest
from loraplex.adapters.ref import AdapterRef, format_ref, is_name, parse_ref
from loraplex.router.api.request.fields import choose_adapter
from loraplex.router.api.request.formatter import ApiLimits
from loraplex.router.call import AdapterChoice, MergedChoice, RequestError, Secret
from loraplex.router.names.aliases import Aliases
from loraplex.router.names.catalog import Catalog, CatalogRules
from loraplex.router.names.registration import AliasState, Origin, Registration, seen
from loraplex.router.names.served import Origin as ServedOrigin
from loraplex.router.names.served import OwnedName, ServedAdapter
from loraplex.router.names.use import AdapterUse
from loraplex.router.policy.rollout import Content, HeldContent
from loraplex.router.shared.memory_store import MemoryStore
from loraplex.router.shared.store import Row, Store
from loraplex.router.tenancy.keys import NOBODY, ApiKey, Caller, check_scope
from tests.router.fake_worker import make_manifest
from tests.router.serving import COMMIT

TENANTS = ("", "acme", "globex")
OPERATORS = Secret("hf_operator")


def owned(
    name: str, tenant: str = "", state: AliasState = "ready", origin: Origin = "api"
) -> Registration:
    """Registered to content of its own, which the operator's token alone opens."""
    ref = AdapterRef("hub", f"private/{tenant or 'fleet'}-{name}")
    plain = Registration(name, ref, origin, state=state, tenant=tenant)
    if state in ("registered", "deleted"):
        return plain
    return seen(plain, Content(ref, make_manifest(ref.name)), 5.0)


def digest_of(name: str, tenant: str = "") -> str:
    return owned(name, tenant).digest or ""


def in_service_for(aliases: Aliases, tenant: str) -> list[Registration]:
    found = (aliases.find(tenant, name) for name in aliases.names_for(tenant))
    return [one for one in found if one is not None and one.in_service]


# One caller's name


@pytest.mark.parametrize(
    ("own", "fleets", "claimed", "expected"),
    [
        (None, None, False, None),
        (None, "ready", False, "fleet"),
        ("ready", None, False, "own"),
        ("ready", "ready", False, "own"),
        ("registered", "ready", False, "own"),
        ("unloading", "ready", False, "own"),
        ("unloaded", "ready", False, "own"),
        ("deleted", "ready", False, "fleet"),
        ("deleted", "unloaded", False, "fleet"),
        ("deleted", None, False, "own"),
        ("deleted", "deleted", False, "fleet"),
        (None, "ready", True, None),
        ("deleted", "ready", True, "own"),
        ("ready", "ready", True, "own"),
    ],
)
async def test_a_tenants_own_name_comes_before_the_fleets(
    own: AliasState | None, fleets: AliasState | None, claimed: bool, expected: str | None
) -> None:
    aliases = Aliases(MemoryStore(time.time), False)
    wanted = {
        "own": None if own is None else owned("sql", "acme", own),
        "fleet": None if fleets is None else owned("sql", "", fleets),
    }
    for registration in (*wanted.values(), owned("sql", "globex")):
        if registration is not None:
            await aliases.write(registration)
    if claimed:
        aliases.claimed = frozenset({OwnedName("sql", "acme")})
    found = aliases.find("acme", "sql")
    assert found == (None if expected is None else wanted[expected])
    assert aliases.find("", "sql") == wanted["fleet"], "who has no tenant"
    in_service = found is not None and found.in_service
    assert [one.name for one in in_service_for(aliases, "acme")] == ["sql"] * in_service


@pytest.mark.parametrize(
    ("claimed", "word", "expected"),
    [
        (None, "sql", "local:sql"),
        ("acme", "sql", "not_found"),
        ("", "sql", "not_found"),
        ("globex", "sql", "local:sql"),
        ("", "alias:sql", "not_found"),
        ("", "local:sql", "local:sql"),
    ],
)
def test_no_folder_stands_in_for_a_declared_name(
    claimed: str | None, word: str, expected: str
) -> None:
    aliases = Aliases(MemoryStore(time.time), False)
    if claimed is not None:
        aliases.claimed = frozenset({OwnedName("sql", claimed)})
    rules = CatalogRules(aliases, (), None, False, 30.0, 60.0)
    choice = AdapterChoice(word, parse_ref(word, "local"), tenant="acme")
    try:
        told = format_ref(rules.target(choice)[0])
    except AdapterError as error:
        told = error.code
    assert told == expected


@pytest.mark.parametrize("tenant", TENANTS)
@pytest.mark.parametrize("name", ["sql", "a.b-c", "A" * 96])
def test_a_spelling_is_one_names_and_no_references(name: str, tenant: str) -> None:
    spelled = str(OwnedName(name, tenant))
    assert is_name(spelled) == (not tenant)
    if tenant:
        for source in ("hub", "local"):
            with pytest.raises(AdapterError):
                parse_ref(spelled, source)
    assert Aliases(MemoryStore(time.time), False, [owned(name, tenant)]).find("", spelled) == (
        None if tenant else owned(name)
    )


# The table, in one router and shared


async def test_equal_names_have_lives_of_their_own(store: Store) -> None:
    one, two = Aliases(store, True), Aliases(store, True)
    names = [OwnedName("sql", tenant) for tenant in TENANTS]
    for name in names:
        await one.write(owned(name.name, name.tenant))
    await two.refresh()
    assert [registration.key for registration in two.all()] == names
    assert [two.get(name) for name in names] == [owned("sql", tenant) for tenant in TENANTS]
    pinned = msgspec.structs.replace(owned("sql", "acme"), pinned=True)
    await two.write(pinned)
    fleets = two.get(OwnedName("sql"))
    assert fleets is not None
    two.note(fleets, msgspec.structs.replace(fleets, error="odd"))
    await two.write(owned("sql", "globex", "deleted"))
    await one.refresh()
    assert one.pinned() == [pinned]
    assert one.all() == [owned("sql"), pinned]
    assert [registration.error for registration in two.all()] == ["odd", None]
    restarted = Aliases(store, True, [owned("sql", "globex", "registered", "file")])
    await restarted.refresh()
    assert [r.key for r in restarted.all()] == names, "a declaration is one owner's, too"
    await restarted.drop(owned("sql", "globex", "deleted", "file"))
    assert [r.key for r in restarted.all()] == names[:2]


async def test_tokens_stay_with_their_owner() -> None:
    aliases = Aliases(MemoryStore(time.time), False)
    for tenant in TENANTS:
        token = Secret(f"hf_{tenant}")
        await aliases.write(msgspec.structs.replace(owned("sql", tenant), token=token))
    assert [r.token for r in aliases.all()] == [f"hf_{tenant}" for tenant in TENANTS]


async def test_rows_without_a_tenant_are_the_fleets(store: Store) -> None:
    """As they were written before names had owners."""
    plain = msgspec.to_builtins(owned("sql"))
    assert "tenant" not in plain
    await store.put("adapters", "sql", Row(1, msgspec.json.encode(plain)))
    aliases = Aliases(store, True)
    await aliases.refresh()
    for tenant in TENANTS:
        assert aliases.find(tenant, "sql") == owned("sql")
    await aliases.write(msgspec.structs.replace(owned("sql"), pinned=True))
    rows = (await store.read("adapters")).rows
    assert (list(rows), rows["sql"].revision) == (["sql"], 2), "and stay where they are"


async def test_a_row_is_believed_under_its_own_key_only() -> None:
    store = MemoryStore(time.time)
    await store.put("adapters", "sql", Row(1, msgspec.json.encode(owned("sql", "acme"))))
    aliases = Aliases(store, True)
    await aliases.refresh()
    assert [aliases.find(tenant, "sql") for tenant in TENANTS] == [None] * 3
    assert aliases.all() == []


async def test_running_requests_are_counted_by_owner() -> None:
    use = AdapterUse(time.time)
    ref, manifest = AdapterRef("hub", "org/same"), make_manifest("org/same")
    releases = {
        tenant: use.hold(ServedAdapter("sql", ref, None, manifest, OwnedName("sql", tenant)))
        for tenant in ("acme", "globex")
    }
    assert [use.running(OwnedName("sql", tenant)) for tenant in TENANTS] == [0, 1, 1]
    held = HeldContent("", manifest.digest)
    draining = asyncio.create_task(use.drained(OwnedName("sql", "acme"), held))
    releases["acme"]()
    await draining
    assert use.running(OwnedName("sql", "globex")) == 1


# Nobody gets another's

NAMES = ("sql", "tone", "acme", "globex")
STATES: list[AliasState] = ["registered", "ready", "unloading", "unloaded", "deleted"]
ORIGINS: list[Origin] = ["api", "file", "option"]
KEYS = [OwnedName(name, tenant) for name in NAMES for tenant in TENANTS]
TABLES = st.dictionaries(
    st.sampled_from(KEYS), st.tuples(st.sampled_from(STATES), st.sampled_from(ORIGINS))
).map(
    lambda table: [
        owned(name.name, name.tenant, state, origin)
        for name, (state, origin) in table.items()
        if state != "deleted" or origin == "api"
    ]
)
WORDS = st.one_of(
    st.sampled_from(NAMES),
    st.sampled_from(KEYS).map(str),
    st.sampled_from(KEYS).map(lambda key: f"{key.tenant}/{key.name}"),
    st.sampled_from(KEYS).map(lambda key: f"alias:{key.name}"),
    st.sampled_from(KEYS).map(lambda key: f"hub:private/{key.tenant or 'fleet'}-{key.name}"),
    st.sampled_from(["org/public", "sql@main", " sql", "SQL", "::sql", ""]),
)
PATTERNS = st.lists(st.sampled_from(["*", "sql", "?*", "acme*", "*::*", "hub:*", "private/*"]))


class Asked:
    """One caller's words to a catalog, and all of its answers."""

    def __init__(self, table: Iterable[Registration], claimed: frozenset[OwnedName]) -> None:
        self._table = list(table)
        self._claimed = claimed

    async def answers(self, caller: Caller, words: list[str], source: str) -> list[str]:
        aliases = await self._aliases()
        rules = CatalogRules(aliases, (), OPERATORS, False, 30.0, 60.0)
        catalog = Catalog(rules, _pin, _load, lambda: 0.0, lambda: 0.0)
        limits = ApiLimits(base_names=("base",), default_source=source)
        chosen = [partial(_chosen, word, caller, limits) for word in words]
        told = [await _told(catalog, caller, make) for make in chosen]
        told.append(await _told(catalog, caller, lambda: _merged([make() for make in chosen])))
        return [*told, *(f"lists {one.name}" for one in in_service_for(aliases, caller.tenant))]

    async def _aliases(self) -> Aliases:
        declared = [one for one in self._table if one.origin != "api"]
        aliases = Aliases(MemoryStore(lambda: 0.0), False, declared)
        for registration in self._table:
            if registration.origin == "api":
                await aliases.write(registration)
        aliases.claimed = self._claimed
        return aliases


def _chosen(word: str, caller: Caller, limits: ApiLimits) -> AdapterChoice:
    choice = choose_adapter(word, None, None, "model", limits)
    if choice is None:
        raise RequestError("invalid", "the base")
    return choice.asked_by(caller.tenant)


def _merged(choices: list[AdapterChoice]) -> MergedChoice:
    return MergedChoice(tuple(choices), (1.0,) * len(choices), "linear", 0.0, "total")


async def _told(
    catalog: Catalog, caller: Caller, choose: Callable[[], AdapterChoice | MergedChoice]
) -> str:
    try:
        choice = choose()
        check_scope(caller, choice, ("base",), catalog.rules.registered_name, "model")
        served = await catalog.resolve(choice)
    except (RequestError, AdapterError) as error:
        return f"{getattr(error, 'cause', '') or getattr(error, 'code', '')}: {error}"
    return f"digest {served.digest} by {served.alias}"


async def _pin(ref: AdapterRef, token: Secret | None) -> AdapterRef:
    if ref.name.startswith("private/") and token != OPERATORS:
        raise AdapterError("not_found", f"no repository {ref.name}")
    return msgspec.structs.replace(ref, revision=COMMIT)


async def _load(
    origin: ServedOrigin, token: Secret | None, base: str
) -> tuple[AdapterManifest, str]:
    if isinstance(origin, AdapterRef):
        return make_manifest(origin.name), base
    return make_manifest(origin.recipe.digest), base


@given(
    TABLES,
    st.frozensets(st.sampled_from(KEYS)),
    st.sampled_from(TENANTS),
    PATTERNS,
    st.lists(WORDS, min_size=1, max_size=4),
    st.sampled_from(["hub", "local"]),
)
def test_no_caller_ever_gets_another_tenants_name(
    table: list[Registration],
    claimed: frozenset[OwnedName],
    tenant: str,
    models: list[str],
    words: list[str],
    source: str,
) -> None:
    """A caller gets the same answers as if the others' names were not there, whatever its key
    opens."""
    key = ApiKey("id", tenant, "0" * 64, models=tuple(models))
    caller = Caller(key) if tenant else NOBODY
    mine = ("", tenant)
    answers = asyncio.run(Asked(table, claimed).answers(caller, words, source))
    alone = Asked((r for r in table if r.tenant in mine), claimed)
    assert answers == asyncio.run(alone.answers(caller, words, source))
    others = {digest_of(r.name, r.tenant) for r in table if r.tenant not in mine}
    assert not any(digest in answer for digest in others for answer in answers)
