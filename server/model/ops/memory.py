"""How an engine's memory options turn into pages, extents and a context length. Pure arithmetic."""

from collections import Counter
from collections.abc import Sequence
from math import prod
from mmap import PAGESIZE

import msgspec

from loraplex.adapters.base import CHOOSERS
from loraplex.adapters.manifest import ITEM_BYTES, SlabDtype
from loraplex.server.config import ConfigError, EngineConfig, KvDtype
from loraplex.server.engine.executor import ExecutorLimits, MemoryLine, PictureLimits
from loraplex.server.engine.memory.room import pages_held, tokens_that_fit
from loraplex.server.model.ops.sizes import MOST_PADDING
from loraplex.server.model.quantisation.forms import multiplies_rounded, packed_bytes
from loraplex.server.model.spec.latent_spec import LatentSpec
from loraplex.server.model.spec.linear_spec import MXFP4_BLOCK, MXFP4_TENSORS, LinearSpec
from loraplex.server.model.spec.model_spec import AttentionSpec, LayerSpec, ModelSpec, layer_path
from loraplex.server.model.spec.moe_spec import MoeSpec
from loraplex.server.model.spec.page_groups import page_groups, page_heads
from loraplex.server.model.spec.picture_spec import PictureSpec
from loraplex.server.model.spec.state_spec import DeltaNetSpec, Mamba2Spec, ShortConvSpec
from loraplex.server.protocol import RoutingForm

# CUDA's context, modules and handles, captured graphs, attention workspaces.
_FIXED_WORKSPACE = 2 << 30
# Keys and values of a layer, widened from eight bits for a library's attention of prompts.
WIDENED_BYTES = 512 << 20
# Rows whose logits are scored, penalised or drawn from in torch at once, and copies of them in
# float32 that the costliest sampling holds: they bound the memory of logits, whatever rows want.
LOGITS_ROWS = 64
_LOGITS_COPIES = 8
_FA2_PROGRAMS, _FA2_QUERIES = 2, 128
# Tokens of a chunk in which states are computed (`loraplex.server.kernels.states`).
_CHUNK = 32
# Of the cache of pictures' results: tokens of a block. Of one picture: tokens that are always
# served, as a photo of 12 megapixels has with Qwen2.5-VL. Of a tower: patches times layers between
# two steps.
_BLOCK_TOKENS = 64
_PICTURE_TOKENS = 1 << 14
_CHUNK_PATCHES = {"cuda": 1 << 14, "cpu": 1 << 10}
_GIB = 1 << 30
# What a file takes beside its page.
_FILE_BYTES = 4096
WORKSPACE = "workspace"
MEMORY_ADVICE = (
    "Raise --gpu-memory-utilization, lower --adapter-memory, --kv-memory, --max-running,"
    " --max-step-tokens or --max-context, or take a smaller model or a larger GPU"
)


class DeviceMemory(msgspec.Struct, frozen=True):
    """Bytes of a GPU: all, and what was free before this engine took any and is free now."""

    total: int
    free_before: int
    free_now: int


def weights_bytes(model: ModelSpec, dtype: SlabDtype, *, packed: bool) -> int:
    """Bytes of the weights on the device.

    packed: quantised matrices of layers stay so, all that config.json speaks of.
    """
    shapes = model.tensors()
    if model.pictures is not None:  # whole on each device, in floating point
        shapes |= {f"tower.{name}": of for name, of in model.pictures.tower.tensors().items()}
    total = sum(prod(shape) for name, shape in shapes.items() if not name.endswith(MXFP4_TENSORS))
    total *= ITEM_BYTES[dtype]
    for index, layer in enumerate(model.layers):
        for linear in layer.linears:
            total += _beside(model, index, linear, ITEM_BYTES[dtype], packed)
    return total


def _beside(model: ModelSpec, layer: int, linear: LinearSpec, item: int, packed: bool) -> int:
    """Bytes of a linear beside those of what it has in floating point; less than none where that
    stays quantised."""
    if linear.stored is not None and linear.stored.form == "mxfp4":
        numbers = linear.experts * linear.out_features * linear.in_features
        return numbers // 2 + 2 * (numbers // MXFP4_BLOCK) if packed else numbers * item
    if model.quantisation is None or not packed or linear.role in CHOOSERS:
        return 0  # what chooses experts is in floating point once it is loaded
    form_of = model.quantisation.form
    kinds = Counter((form_of(layer_path(layer, path)), m, n) for path, m, n in linear.matrices())
    return sum(
        count * (packed_bytes(form, m, n) - m * n * item)
        for (form, m, n), count in kinds.items()
        if form is not None
    )


def page_bytes(model: ModelSpec, engine: EngineConfig) -> int:
    """Bytes of one page: keys and values of its tokens, in the layers of a group."""
    return engine.page_size * page_token_bytes(model, engine.dtype, engine.kv_dtype)


def page_token_bytes(model: ModelSpec, dtype: SlabDtype, kv_dtype: KvDtype) -> int:
    """Bytes of a page for each of its tokens."""
    scales = page_heads(model) * _scale_bytes(kv_dtype)
    return 2 * (page_groups(model).width * _kept_bytes(dtype, kv_dtype) + scales)


def layer_token_bytes(attention: AttentionSpec, dtype: SlabDtype, kv_dtype: KvDtype) -> int:
    """Bytes of the keys and values of one token, in one layer."""
    scales = attention.num_kv_heads * _scale_bytes(kv_dtype)
    return 2 * (attention.kv_size * _kept_bytes(dtype, kv_dtype) + scales)


def _kept_bytes(dtype: SlabDtype, kv_dtype: KvDtype) -> int:
    return ITEM_BYTES[dtype] if kv_dtype == "auto" else 1


def _scale_bytes(kv_dtype: KvDtype) -> int:
    """Bytes of the scale that a head of one token has."""
    return 4 if kv_dtype == "int8" else 0


def workspace_bytes(model: ModelSpec, engine: EngineConfig) -> int:
    """Upper estimate of what a step needs beside weights, KV cache and adapters."""
    item = ITEM_BYTES[engine.dtype]
    inner = max(_inner_width(layer, model.hidden_size) for layer in model.layers)
    attentions = model.attentions.values()
    widths = 4 * model.hidden_size + max(map(_mixer_width, model.layers)) + inner
    widths += _inputs_width(model)
    activations = engine.max_step_tokens * widths * item
    # Of every row in the model's dtype twice: those of the graphs, and those of a step outside.
    # What new ids add comes when the activations are gone.
    rows = engine.max_running + MOST_PADDING
    copies = rows * 2 * item + LOGITS_ROWS * 4 * _LOGITS_COPIES
    logits = copies * model.vocab_size
    masks = engine.max_running * -(-model.vocab_size // 32) * 4
    # What pieces of contexts give, in float32; of a sequence one piece and a half.
    heads = max((a.num_heads for a in attentions), default=0)
    pieces = rows * 6 * heads * max((a.head_dim for a in attentions), default=0)
    context = engine.max_context or model.max_context
    # Of each row its tokens, of rows with penalties once more, and its pages; the rotation of each
    # position; adapters' records.
    groups = len(page_groups(model).windows)
    row = context * 4 + groups * -(-context // engine.page_size) * 8
    records = (engine.adapter_slots + engine.max_running) * model.num_sites * 64
    tables = engine.max_running * row + LOGITS_ROWS * context * 4
    tables += _rotation_bytes(model, engine, context) + records
    passing = 2 * activations + logits + masks + pieces + _written_out(model) * item
    widened = WIDENED_BYTES if engine.kv_dtype != "auto" else 0
    return _FIXED_WORKSPACE + widened + passing + tables


def _written_out(model: ModelSpec) -> int:
    """Numbers of quantised matrices that are written out at once: in a graph by products of many
    rows, unless they multiply eight bits, and outside, there for lengths of DoRA's rows, too."""
    if model.quantisation is None:
        return 0
    outside = in_graphs = 0
    for index, layer in enumerate(model.layers):
        for linear in layer.linears:
            path = layer_path(index, linear.parts[0].path)
            form, numbers = model.quantisation.form(path), linear.out_features * linear.in_features
            if form is not None:
                outside = max(outside, numbers)
            if form is not None and not multiplies_rounded(form):
                in_graphs = max(in_graphs, numbers)
    return outside + in_graphs


def _mixer_width(layer: LayerSpec) -> int:
    """Numbers that a token needs within attention, or within what mixes tokens by a state."""
    found = 0
    for branch in layer.branches:
        # Queries, of features and of latents, and results; keys and values of as many tokens that
        # are unfolded from latents lie where some of these would.
        if isinstance(branch, LatentSpec):
            found += branch.num_heads * 3 * branch.head_dim + 3 * branch.q_size
        elif isinstance(branch, AttentionSpec):
            has_gates = branch.is_gated or branch.gate is not None
            found += (7 if has_gates else 3) * branch.q_size
        elif isinstance(branch, DeltaNetSpec):
            # In float32 of each head a row of a chunk's system.
            systems = 2 * branch.value_heads * _CHUNK
            found += 2 * (branch.num_channels + branch.value_size) + systems
        elif isinstance(branch, Mamba2Spec):  # what is read from states is in float32
            found += branch.mixed.out_features + branch.num_channels + 3 * branch.inner
        elif isinstance(branch, ShortConvSpec):
            found += branch.channels
    return found


def state_bytes(model: ModelSpec, dtype: SlabDtype) -> int:
    """Bytes of one sequence's states, in all layers."""
    return sum(
        prod(form.shape) * ITEM_BYTES["float32" if form.wide else dtype]
        for forms in model.states.values()
        for form in forms
    )


def states_bytes(model: ModelSpec, engine: EngineConfig) -> int:
    """Bytes of all states: of each row, and of what pads a step."""
    return (engine.max_running + 1) * state_bytes(model, engine.dtype)


def num_snapshots(model: ModelSpec, engine: EngineConfig) -> int:
    """Number of snapshots of states that their memory holds: none without pages, beside which they
    lie."""
    if not page_groups(model).windows:
        return 0
    return engine.snapshot_memory // each if (each := state_bytes(model, engine.dtype)) else 0


def snapshots_bytes(model: ModelSpec, engine: EngineConfig) -> int:
    """Bytes of all snapshots of states."""
    return num_snapshots(model, engine) * state_bytes(model, engine.dtype)


def draft_inputs_bytes(model: ModelSpec, engine: EngineConfig) -> int:
    """Bytes of what states may take again of drafts."""
    features = sum(map(sum, model.state_inputs.values()))
    return (engine.max_running + 1) * engine.max_draft * features * ITEM_BYTES[engine.dtype]


def picture_limits(
    model: ModelSpec, engine: EngineConfig, max_context: int
) -> PictureLimits | None:
    """Work out the limits of pictures; None where the model reads none. max_context: of sequences.
    Raises ConfigError where not one block of results has room.
    """
    pictures = model.pictures
    if pictures is None or not engine.picture_memory:
        return None
    block = pictures.result_size * ITEM_BYTES[engine.dtype] * _BLOCK_TOKENS
    blocks = engine.picture_memory // block
    if not blocks:
        raise ConfigError(
            f"--picture-memory is {engine.picture_memory} bytes; one block alone takes {block}"
            " (0 = the model reads no pictures)"
        )
    fitting = engine.picture_memory // (_patch_bytes(pictures, engine) * pictures.form.side**2)
    most_tokens = max(engine.max_step_tokens, _PICTURE_TOKENS, fitting)
    if engine.picture_tokens:  # no picture has more
        most_tokens = min(most_tokens, engine.picture_tokens)
    most_tokens = min(most_tokens, pictures.most_tokens or most_tokens)
    return PictureLimits(
        token_id=pictures.token_id,
        form=pictures.form,
        columns=pictures.columns,
        most_tokens=min(most_tokens, blocks * _BLOCK_TOKENS, max_context),
        num_blocks=blocks,
        block_tokens=_BLOCK_TOKENS,
        chunk=_CHUNK_PATCHES[engine.device],
        is_flat=pictures.axes is None,
        tower_layer=model.num_layers,
        is_joined=any(of.joins_pictures for of in model.attentions.values()),
    )


def pictures_bytes(model: ModelSpec, engine: EngineConfig) -> int:
    """Upper estimate of what pictures need beside weights: their results, patches of two of them,
    and the tower's work on one."""
    context = min(engine.max_context or model.max_context, model.max_context)
    limits = picture_limits(model, engine, context)
    if limits is None or model.pictures is None:
        return 0
    tower, item = model.pictures.tower, ITEM_BYTES[engine.dtype]
    inner = max((_inner_width(layer, tower.hidden_size) for layer in tower.layers), default=0)
    # Of rows that go through a layer at once: q, k and v, these by windows, what is attended, a
    # product and a sum; rotated q and k in float32.
    of_row = (12 * tower.hidden_size + inner) * item + 4 * tower.hidden_size * 4
    form, patches = limits.form, limits.most_tokens * limits.form.side**2
    if form.tile:
        patches = form.patches(form.largest(limits.most_tokens))
    at_once = min(2 * patches, limits.chunk)
    of_patches = max(patches, at_once) * _patch_bytes(model.pictures, engine)
    return engine.picture_memory + of_patches + at_once * of_row


def _patch_bytes(pictures: PictureSpec, engine: EngineConfig) -> int:
    """Bytes that a patch needs as long as its picture is in the tower: its numbers, twice; the
    stream, its norm, q, k and v; or, before that, vectors of its place in float32; its rotation;
    its part of results, which deep mergers keep until the last layer."""
    tower, item = pictures.tower, ITEM_BYTES[engine.dtype]
    streams = tower.hidden_size * max(6 * item, 2 * item + 3 * 4)
    turns = 2 * 4 * max((of.head_dim for of in tower.attentions.values()), default=0)
    results = 2 * pictures.result_size * item // pictures.form.side**2
    return 2 * pictures.columns * item + streams + turns + results


def _inner_width(layer: LayerSpec, hidden: int) -> int:
    """Numbers that a token needs within MLPs; with experts those of each that it has, whose inputs
    and results lie apart from the token's."""
    found = 0
    for branch in layer.feed_forwards:
        width = 3 * branch.size
        found += branch.top_k * (width + 2 * hidden) if isinstance(branch, MoeSpec) else width
    return found


def _inputs_width(model: ModelSpec) -> int:
    """Numbers that a token needs for what layers read beside the stream: the product, its norm, the
    table's rows and the sum."""
    inputs = model.embedding.inputs
    return 0 if inputs is None else 2 * inputs.layers * (inputs.size + inputs.own_size)


def _rotation_bytes(model: ModelSpec, engine: EngineConfig, context: int) -> int:
    """Cosines and sines of every position, of each rotation that layers have, and of its long
    factors; with pictures also of a step's tokens."""
    kinds = {(of.rope, of.head_dim) for of in model.attentions.values()}
    turned = sum(rope.rotary_dim or head for rope, head in kinds if rope is not None)
    forms = 1 if model.within(context).short_context is None else 2
    is_flat = model.pictures is None or model.pictures.axes is None
    of_step = 0 if is_flat else engine.max_step_tokens + MOST_PADDING
    return (forms * context + of_step) * turned * 4


def split_prompts_bytes(attention: AttentionSpec, processors: int) -> int:
    """Bytes that FlashInfer's FA2 needs at most to cut the contexts of few prompts into pieces.

    The bytes are for float32 results and sums. Two programs run at once on each multiprocessor, one
    for each piece and kv head. Each has a tile of up to 128 queries, tokens of all heads of its
    group counted (`PrefillPlan` in scheduler.cuh).
    """
    pieces = _FA2_PROGRAMS * processors // attention.num_kv_heads
    return pieces * attention.num_heads * _FA2_QUERIES * (attention.head_dim + 1) * 4


def _for_snapshots(model: ModelSpec, engine: EngineConfig, nbytes: int) -> int:
    """Bytes for snapshots, of so many below the device: they are divided as the device's."""
    of_device = snapshots_bytes(model, engine)
    return nbytes * of_device // (of_device + engine.kv_memory) if of_device else 0


def host_snapshots(model: ModelSpec, engine: EngineConfig) -> int:
    """Number of snapshots of states in host memory."""
    each = state_bytes(model, engine.dtype)
    return _for_snapshots(model, engine, engine.host_kv_memory) // each if each else 0


def host_pages_bytes(model: ModelSpec, engine: EngineConfig) -> int:
    """Bytes of host memory for pages, in whole pages of the system. Snapshots lie behind them."""
    of_snapshots = host_snapshots(model, engine) * state_bytes(model, engine.dtype)
    return (engine.host_kv_memory - of_snapshots) // PAGESIZE * PAGESIZE


def _disk_snapshots_bytes(model: ModelSpec, engine: EngineConfig) -> int:
    """Bytes of the disk for snapshots: none where host memory keeps none, through which they go."""
    return _for_snapshots(model, engine, engine.disk_kv) if host_snapshots(model, engine) else 0


def memory_table(
    model: ModelSpec, engine: EngineConfig, weights: int, others: int = 0
) -> tuple[MemoryLine, ...]:
    """List all uses of memory of a device, and of its process below the device. weights, others:
    bytes of the model's weights, and of other programs."""
    each = state_bytes(model, engine.dtype)
    of_disk = _disk_snapshots_bytes(model, engine)
    lines = (
        MemoryLine("weights", weights),
        MemoryLine("adapters", engine.adapter_memory),
        MemoryLine("other programs", others),
        MemoryLine("KV cache", engine.kv_memory if page_groups(model).windows else 0),
        MemoryLine("states", states_bytes(model, engine)),
        MemoryLine("snapshots", snapshots_bytes(model, engine)),
        MemoryLine("inputs of drafts", draft_inputs_bytes(model, engine)),
        MemoryLine("pictures", pictures_bytes(model, engine)),
        MemoryLine(WORKSPACE, workspace_bytes(model, engine)),
        MemoryLine("KV cache", host_pages_bytes(model, engine), "host"),
        MemoryLine("snapshots", host_snapshots(model, engine) * each, "host"),
        MemoryLine("KV cache", engine.disk_kv - of_disk, "disk"),
        MemoryLine("snapshots", of_disk, "disk"),
    )
    return tuple(line for line in lines if line.nbytes)


def fill_device(model: ModelSpec, engine: EngineConfig, memory: DeviceMemory) -> EngineConfig:
    """Return `engine` with `kv_memory` resolved. memory: with the weights there.

    Raises ConfigError with the estimate and what to do when that leaves nothing for a KV cache, or
    less than was asked for.
    """
    usable = int(memory.total * engine.gpu_memory_utilization)
    weights, others = memory.free_before - memory.free_now, memory.total - memory.free_before
    lines = memory_table(model, engine, weights, others)
    table = tuple(line for line in lines if line.where == "device")
    if engine.kv_memory:  # whoever asks for that much may leave a step less than the estimate
        asked = tuple(line for line in table if line.name != WORKSPACE)
        if sum(line.nbytes for line in asked) > memory.total:
            raise ConfigError(_too_little(asked, f"{memory.total / _GIB:.1f} GiB"))
        return engine
    left = usable - sum(line.nbytes for line in table)
    if left < page_bytes(model, engine) * 2:
        share = f"{engine.gpu_memory_utilization:.2f} of {memory.total / _GIB:.1f} GiB"
        raise ConfigError(_too_little(table, f"{usable / _GIB:.1f} GiB ({share})"))
    if not page_groups(model).windows:
        return engine
    return msgspec.structs.replace(engine, kv_memory=min(left, _most_kv(model, engine) or left))


def _most_kv(model: ModelSpec, engine: EngineConfig) -> int:
    """Bytes of the KV cache that `kv_contexts` allows; 0 = any."""
    context = min(engine.max_context or model.max_context, model.max_context)
    pages = -(-context // engine.page_size) + 1  # an admission keeps one in reserve
    return engine.kv_contexts * pages * page_bytes(model, engine) * len(page_groups(model).windows)


def _too_little(table: Sequence[MemoryLine], of: str) -> str:
    estimate = ", ".join(f"{line.name} {line.nbytes / _GIB:.1f} GiB" for line in table)
    return f"not enough GPU memory for a KV cache: {estimate}, of {of}. {MEMORY_ADVICE}"


def executor_limits(
    model: ModelSpec, engine: EngineConfig, weight_bytes: int | None = None
) -> ExecutorLimits:
    """Work out the executor's limits from the memory that it may use. weight_bytes: as of
    `weights_bytes`, where it is known. Raises ConfigError naming the option that is too small, with
    the value that would do.
    """
    if weight_bytes is None:
        weight_bytes = weights_bytes(model, engine.dtype, packed=True)
    page = page_bytes(model, engine)
    windows = page_groups(model).windows
    num_pages, least = engine.kv_memory // page if page else 0, page * len(windows)
    if num_pages < len(windows):
        raise ConfigError(f"--kv-memory is {engine.kv_memory} bytes; one page alone takes {least}")
    of_host = host_pages_bytes(model, engine)
    if engine.host_kv_memory and of_host < least:
        what = f"one page alone takes {least}" if least else "the model keeps no keys and values"
        raise ConfigError(f"--host-kv-memory is {engine.host_kv_memory} bytes; {what}")
    extents = engine.adapter_memory // engine.extent_bytes
    if engine.adapter_slots > 0 and extents < 1:
        raise ConfigError(
            f"--adapter-memory is {engine.adapter_memory} bytes; at least {engine.extent_bytes}"
            " (one extent) are needed"
        )
    max_context = _max_context(model, engine, num_pages, page)
    of_disk, each = _disk_snapshots_bytes(model, engine), state_bytes(model, engine.dtype)
    return ExecutorLimits(
        num_pages=num_pages,
        page_size=engine.page_size,
        max_rows=engine.max_running,
        max_step_tokens=engine.max_step_tokens,
        max_decodes=engine.max_decodes,
        max_context=max_context,
        vocab_size=model.vocab_size,
        eos_token_ids=model.eos_token_ids,
        adapter_slots=engine.adapter_slots,
        arena_extents=extents,
        extent_bytes=engine.extent_bytes,
        short_context=model.within(max_context).short_context,
        page_windows=windows,
        num_classes=0 if model.classes is None else len(model.classes.labels),
        writes=model.writes,
        is_causal=model.is_causal,
        has_states=bool(model.states),
        num_snapshots=num_snapshots(model, engine),
        weight_bytes=weight_bytes,
        token_bytes=page // engine.page_size * len(windows),
        num_devices=engine.shards,
        pictures=picture_limits(model, engine, max_context),
        host_pages=of_host // page if page else 0,
        disk_pages=(engine.disk_kv - of_disk) // (page + _FILE_BYTES) if page else 0,
        host_snapshots=host_snapshots(model, engine),
        disk_snapshots=of_disk // (each + _FILE_BYTES),
        routing=_routing_form(model),
    )


def _routing_form(model: ModelSpec) -> RoutingForm | None:
    """The form in which experts are reported; None where no layer has experts, or layers choose
    unlike numbers of them.
    """
    of_layers = [
        [feed for feed in layer.feed_forwards if isinstance(feed, MoeSpec)]
        for layer in model.layers
    ]
    specs = [spec for layer in of_layers for spec in layer]
    if len({spec.top_k for spec in specs}) != 1 or any(len(layer) > 1 for layer in of_layers):
        return None
    is_small = all(spec.experts <= 256 for spec in specs)
    return RoutingForm(model.num_layers, specs[0].top_k, 1 if is_small else 2)


def _max_context(model: ModelSpec, engine: EngineConfig, num_pages: int, page: int) -> int:
    """The longest context. One that was asked for must fit; any other is cut to the room.

    page: bytes of a page.
    """
    of_pages = (engine.page_size, page_groups(model).windows)
    room = tokens_that_fit(num_pages, *of_pages)
    if engine.max_context is None:
        whole = room if model.is_causal else engine.max_step_tokens
        return min(model.max_context, room, whole)
    if engine.max_context > model.max_context:
        raise ConfigError(
            f"--max-context is {engine.max_context}; the model reaches {model.max_context} tokens"
        )
    if not model.is_causal and engine.max_context > engine.max_step_tokens:
        raise ConfigError(
            f"--max-context is {engine.max_context}; tokens of the model see those behind them, so"
            f" a prompt must fit a step, of --max-step-tokens {engine.max_step_tokens}"
        )
    if engine.max_context > room:
        needed = pages_held(engine.max_context, *of_pages) * page
        raise ConfigError(
            f"--kv-memory is {engine.kv_memory} bytes, enough for {room} tokens; --max-context"
            f" {engine.max_context} takes {needed}"
        )
    return engine.max_context
