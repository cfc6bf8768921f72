"""Small pure rules: sizes, dtypes, back-off, stall, devices, frames."""

from collections.abc import Sequence
from typing import Literal

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loraplex.adapters.base import LAYER_SITES, BaseSpec, LayerModules, ModuleShape, layer_stem
from loraplex.adapters.common.loopback import is_loopback
from loraplex.adapters.manifest import SlabDtype
from loraplex.adapters.ref import AdapterRef
from loraplex.server.protocol import (
    Abort,
    AdapterLoad,
    GenerateRequest,
    PictureSpan,
    SamplingParams,
)
from loraplex.server.worker.address import AddressError, check_exposure, open_listener
from loraplex.server.worker.process.device import CudaDevice, DeviceError, TorchBuild, choose_device
from loraplex.server.worker.process.recovery import Backoff, StallWatch, Verdict
from loraplex.server.worker.process.sizing import (
    MAX_EXTENT,
    MIN_EXTENT,
    choose_dtype,
    choose_extent_bytes,
)
from loraplex.server.worker.validation import check_id, check_load, check_name, check_request
from tests.server.pictures.cards import QWEN

DIGEST = "0a" * 32
H100 = CudaDevice("H100", (9, 0), 80 << 30)
T4 = CudaDevice("T4", (7, 5), 16 << 30)
CUDA_TORCH, CPU_TORCH = TorchBuild("2.13.0", "12.8"), TorchBuild("2.13.0+cpu", None)


def base(hidden: int, inner: int) -> BaseSpec:
    modules = {
        "q_proj": ModuleShape("self_attn.q_proj", hidden, hidden),
        "down_proj": ModuleShape("mlp.down_proj", inner, hidden),
    }
    layers = tuple(LayerModules(layer_stem(n), modules, LAYER_SITES) for n in range(2))
    return BaseSpec(DIGEST, (), hidden, 100, layers, {})


def test_extent_of_an_8b_model_in_bf16() -> None:
    assert choose_extent_bytes(base(4096, 14336), "bfloat16", 8 << 30) == 512 << 10


@given(
    st.integers(8, 20_000),
    st.integers(8, 60_000),
    st.sampled_from(["float32", "float16", "bfloat16"]),
    st.integers(1 << 20, 64 << 30),
)
def test_extents_are_bounded_powers_of_two(
    hidden: int, inner: int, dtype: SlabDtype, memory: int
) -> None:
    extent = choose_extent_bytes(base(hidden, inner), dtype, memory)
    assert MIN_EXTENT <= extent <= MAX_EXTENT
    assert extent & (extent - 1) == 0
    assert extent == MIN_EXTENT or memory // extent >= 64


@pytest.mark.parametrize(
    ("device", "checkpoint", "has_bfloat16", "expected"),
    [
        ("cpu", "bfloat16", True, "float32"),
        ("cuda", "bfloat16", True, "bfloat16"),
        ("cuda", "bfloat16", False, "float16"),
        ("cuda", "float16", True, "float16"),
        ("cuda", "float32", True, "bfloat16"),
        ("cuda", None, True, "bfloat16"),
    ],
)
def test_auto_dtype(
    device: Literal["cpu", "cuda"], checkpoint: str, has_bfloat16: bool, expected: str
) -> None:
    assert choose_dtype("auto", device, checkpoint, has_bfloat16) == expected
    assert choose_dtype("float16", device, checkpoint, has_bfloat16) == "float16"


def test_backoff_doubles_to_a_limit_and_forgets_after_health() -> None:
    backoff = Backoff(first_s=1, most_s=4, healthy_s=60)
    assert [backoff.delay_s(0) for _ in range(4)] == [1, 2, 4, 4]
    assert backoff.delay_s(61) == 1
    assert backoff.delay_s(59) == 2


def alive(watch: StallWatch, now: float, *, has_work: bool) -> Verdict:
    """The verdict on an engine that has just given a sign of life, but no step."""
    watch.heard(now)
    return watch.verdict(now, has_work)


def test_idleness_is_no_stall_and_work_starts_the_clock() -> None:
    watch = StallWatch(10, 0)
    assert alive(watch, 0, has_work=False) == "well"
    assert alive(watch, 1000, has_work=True) == "well"
    assert alive(watch, 1010, has_work=True) == "suspect"
    assert alive(watch, 1010.1, has_work=True) == "stalled"


def test_progress_starts_the_clock_anew() -> None:
    watch = StallWatch(10, 0)
    watch.progressed(0)
    watch.progressed(9)
    assert alive(watch, 13, has_work=True) == "well"
    assert alive(watch, 20, has_work=True) == "stalled"


def test_a_silent_engine_is_suspected_soon_and_replaced_late() -> None:
    watch = StallWatch(120, 0)
    assert watch.verdict(0.9, has_work=False) == "well"
    assert watch.verdict(1.1, has_work=False) == "suspect"
    watch.heard(2)
    assert watch.verdict(2.5, has_work=True) == "well"
    assert watch.verdict(12.1, has_work=True) == "stalled"


def test_a_long_prefill_is_no_stall_where_steps_are_long() -> None:
    watch = StallWatch(120, 0)
    watch.progressed(0, step_s=4)
    assert alive(watch, 30, has_work=True) == "well"
    assert alive(watch, 33, has_work=True) == "suspect"


def test_one_long_step_excuses_later_ones_for_a_while() -> None:
    watch = StallWatch(120, 0)
    watch.progressed(0, step_s=20)
    watch.progressed(0, step_s=0.01)
    assert alive(watch, 100, has_work=True) == "well"
    for _ in range(1000):
        watch.progressed(100, step_s=0.01)
    assert alive(watch, 106, has_work=True) == "suspect"


def test_a_loop_that_waits_forgets_no_long_step() -> None:
    watch = StallWatch(120, 0)
    watch.progressed(0, step_s=4)
    for now in range(1000):
        watch.progressed(now)
    assert alive(watch, 999 + 30, has_work=True) == "well"


def test_a_loop_that_waits_is_heard_in_time_however_low_the_limit() -> None:
    watch = StallWatch(1, 0)
    watch.progressed(0)
    assert alive(watch, 2, has_work=True) == "well"
    assert alive(watch, 3.1, has_work=True) == "stalled"


def test_a_watcher_that_stood_still_itself_judges_nobody() -> None:
    watch = StallWatch(120, 0)
    watch.progressed(0)
    watch.restart(500)
    assert watch.verdict(500.5, has_work=True) == "well"


def test_device_choice() -> None:
    assert choose_device("auto", [H100], CUDA_TORCH).kind == "cuda"
    assert choose_device("cpu", [H100], CUDA_TORCH).kind == "cpu"
    assert not choose_device("cuda", [T4], CUDA_TORCH).has_bfloat16
    assert choose_device("auto", [], CPU_TORCH) == choose_device("cpu", [], None)


def test_a_gpu_that_cannot_be_used_is_said_with_the_remedy() -> None:
    chosen = choose_device("auto", [H100], CPU_TORCH)
    assert chosen.kind == "cpu"
    assert chosen.note is not None
    assert "without CUDA" in chosen.note
    with pytest.raises(DeviceError, match="no NVIDIA driver"):
        choose_device("cuda", [], CUDA_TORCH)
    with pytest.raises(DeviceError, match="pip install"):
        choose_device("cuda", [H100], None)


def request(
    *,
    adapter: str | None = None,
    seed: int = 0,
    salt: str = "",
    prompt: int = 1,
    tenant: str = "",
) -> GenerateRequest:
    sampling = SamplingParams()
    prompt_ids = [1] * prompt
    return GenerateRequest(
        "r", 0, 0, adapter, prompt_ids, [], sampling, seed, salt=salt, tenant=tenant
    )


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (request(adapter="../../etc/passwd"), "64 hexadecimal"),
        (request(adapter=DIGEST[:-1] + "\n"), "64 hexadecimal"),
        (request(seed=-1), "seed"),
        (request(seed=1 << 64), "seed"),
        (request(salt="x" * 1000), "salt"),
        (request(tenant="x" * 1000), "tenant"),
    ],
)
def test_requests_that_are_refused(bad: GenerateRequest, says: str) -> None:
    refused = check_request(bad, 1 << 20, None)
    assert refused is not None
    assert refused.code == "invalid_request"
    assert says in refused.message


GRID = (1, 4, 4)
PLACED = [1, *[QWEN.token_id] * 4, 2, *[QWEN.token_id] * 4]


def pictured(*spans: PictureSpan, ids: Sequence[int] = PLACED) -> GenerateRequest:
    return msgspec.structs.replace(request(), prompt_ids=list(ids), pictures=spans)


@pytest.mark.parametrize(
    ("spans", "says"),
    [
        ((PictureSpan(1, 4, "x", GRID),), "64 hexadecimal"),
        ((PictureSpan(1, 3, DIGEST, GRID),), "does not make 3 tokens"),
        ((PictureSpan(1, 0, DIGEST, (1, 0, 4)),), "does not make 0 tokens"),
        ((PictureSpan(0, 4, DIGEST, GRID),), "no place for a picture at 0"),
        ((PictureSpan(-4, 4, DIGEST, GRID),), "no place for a picture at -4"),
        ((PictureSpan(8, 4, DIGEST, GRID),), "no place for a picture at 8"),
        ((PictureSpan(1, 4, DIGEST, GRID),) * 2, "no place for a picture at 1"),
        ((PictureSpan(1, 0, DIGEST, (1, 1, 1)),), "does not make 0 tokens"),
        ((PictureSpan(1, 1 << 60, DIGEST, (1, 1 << 31, 1 << 31)),), "no place for a picture at 1"),
    ],
)
def test_pictures_without_a_place_are_refused(spans: tuple[PictureSpan, ...], says: str) -> None:
    refused = check_request(pictured(*spans), 1 << 20, QWEN)
    assert refused is not None
    assert says in refused.message


def test_pictures_need_a_model_that_reads_them() -> None:
    good = pictured(PictureSpan(1, 4, DIGEST, GRID), PictureSpan(6, 4, DIGEST, GRID))
    assert check_request(good, 1 << 20, QWEN) is None
    refused = check_request(good, 1 << 20, None)
    assert refused is not None
    assert "reads no pictures" in refused.message


def test_requests_that_are_taken() -> None:
    assert check_request(request(adapter=DIGEST, seed=(1 << 64) - 1), 8, None) is None
    assert check_request(request(prompt=8), 8, None) is None
    refused = check_request(request(prompt=9), 8, None)
    assert refused is not None
    assert refused.code == "context_length"


def test_names_are_bounded() -> None:
    assert check_name(request()) is None
    assert check_name(Abort("r", 0)) is None
    assert check_name(Abort("", 0)) is not None
    assert check_name(Abort("r" * 1000, 0)) is not None
    assert check_name(Abort("r", -1)) is not None
    assert check_name(Abort("r", 0, -1)) is not None


def test_loads_are_bounded() -> None:
    ref = AdapterRef("hub", "org/name")
    good = AdapterLoad("l", ref, "token", DIGEST)
    assert check_id("load_id", good.load_id) is None
    assert check_load(good) is None
    assert check_id("load_id", "l" * 1000) is not None
    for bad, code in (
        (AdapterLoad("l", AdapterRef("hub", "x" * 10_000)), "bad_ref"),
        (AdapterLoad("l", AdapterRef("hub", "x", "r" * 10_000)), "bad_ref"),
        (AdapterLoad("l", ref, "t" * 10_000), "unauthorized"),
        (AdapterLoad("l", ref, "tttt\r\nX-Evil: 1"), "unauthorized"),
        (AdapterLoad("l", ref, ""), "unauthorized"),
        (AdapterLoad("l", ref, None, "../x"), "invalid"),
    ):
        error = check_load(bad)
        assert error is not None
        assert error.code == code
        assert "tttt" not in error.message


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "worker.example"])
def test_an_exposed_worker_needs_a_secret(host: str) -> None:
    with pytest.raises(AddressError, match="secret"):
        check_exposure(host, "")
    check_exposure(host, "secret")
    with pytest.raises(AddressError, match="ASCII"):
        check_exposure(host, "clé")


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_the_loopback_needs_none(host: str) -> None:
    assert is_loopback(host)
    check_exposure(host, "")


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("nowhere.invalid", "host nowhere.invalid is no address of this machine.* with --host"),
        ("192.0.2.1", "host 192.0.2.1 is no address of this machine.* with --host"),
        ("127.0.0.1", "port [0-9]+ of 127.0.0.1 cannot be used: Address already.* with --port"),
    ],
)
def test_an_address_that_cannot_be_used_names_the_option(host: str, words: str) -> None:
    """Of documentation's addresses (RFC 5737) no machine has one; .invalid never resolves."""
    with open_listener("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(AddressError, match=words):
            open_listener(host, port)
