// The fleet's page: figures, workers, adapters, errors, and what is said when there is nothing.

import { keys } from "./api.js";
import { Changes } from "./changes.js";
import { sparkline } from "./chart.js";
import { byId, bytes, clockTime, digits, h, percent, plural, setText } from "./dom.js";
import { VirtualList } from "./list.js";
import { spelled } from "./names.js";
import { RolloutCard, rolloutBadge } from "./rollout.js";
import { Workers } from "./workers.js";

const USES = { vector: "vectors", classes: "classes", fit: "fits" };

export class FleetView {
  /** openKeys: shows the dialog in which keys are typed. */
  constructor(feed, names, openKeys) {
    this.feed = feed;
    this.names = names;
    this.openKeys = openKeys;
    this.sizes = new Map(); // packed bytes of what was once seen in memory
    this.picked = null; // digest
    this.pickedName = null; // where several names mean it
    const pick = (digest) => this.pick(digest);
    this.workers = new Workers(names, pick);
    this.list = new VirtualList("Adapters", 50, {
      empty: "",
      onPick: (item) => this.pick(item.digest, item.title),
    });
    byId("adapters").append(this.list.node);
    this.card = new RolloutCard(names, new Changes(openKeys));
    this.filter = byId("adapter-filter");
    this.filter.addEventListener("input", () => this.showAdapters());
    this.tiles = ["Tokens per second", "Waiting", "KV cache", "On devices", "Errors"].map(tile);
    byId("tiles").append(...this.tiles.map(({ node }) => node));
  }

  pick(digest, name = null) {
    const again = digest === this.picked && (name === null || name === this.pickedName);
    this.picked = again ? null : digest;
    this.pickedName = again ? null : name;
    this.show();
  }

  show() {
    this.showNotice();
    const { fleet } = this.feed;
    byId("fleet-body").hidden = fleet === null;
    byId("fleet-body").classList.toggle("stale", this.feed.state !== "live");
    if (fleet === null) return;
    this.showTiles(fleet);
    this.showWork(fleet);
    this.workers.show(fleet.workers, this.feed.rates, this.picked);
    this.showAdapters();
    this.showErrors(fleet);
  }

  showNotice() {
    const { state, problem, status, fleet } = this.feed;
    const node = byId("fleet-notice");
    const key = `${state} ${status} ${problem} ${fleet === null} ${Boolean(keys.get("admin"))}`;
    if (node.dataset.key === key) return;
    node.dataset.key = key;
    const said = noticeOf(this.feed);
    node.hidden = said === null;
    if (!said) return;
    const [title, text, wantsKey] = said;
    const button = wantsKey
      ? h("button", { class: "primary", type: "button", onclick: this.openKeys }, "Type a key")
      : null;
    node.replaceChildren(h("strong", {}, title), h("p", {}, text), ...(button ? [button] : []));
  }

  showTiles(fleet) {
    const { history } = this.feed;
    const now = history.at(-1);
    const [tokens, waiting, kv, resident, errors] = this.tiles;
    const onDevices = new Set();
    for (const worker of fleet.workers) {
      for (const place of worker.places) if (place.device === "ready") onDevices.add(place.digest);
    }
    const evicted = fleet.workers.reduce((sum, worker) => sum + worker.evictions, 0);
    const told = fleet.errors.reduce((sum, error) => sum + error.count, 0);
    tokens.show(digits(now.tokens), `${plural(now.running, "sequence")} running`, series(history, "tokens"), 10);
    waiting.show(digits(now.waiting), `${digits(fleet.router.queue)} of ${digits(fleet.router.max_queue)} in the queue`, series(history, "waiting"), 4);
    kv.show(percent(now.kv), "of pages in use", series(history, "kv"), 1);
    resident.show(digits(onDevices.size), `${digits(fleet.adapters.length + fleet.adapters_left_out)} registered · ${plural(evicted, "eviction")}`);
    errors.show(digits(told), told ? `last at ${clockTime(fleet.errors[0].time)}` : "none lately", series(history, "errors"), 4);
    errors.node.dataset.tone = told ? "bad" : "";
  }

  /** What is no live answer: nothing is said of what was never asked for. */
  showWork({ work }) {
    const said = [];
    const counts = Object.entries(work.vectors).filter(([, count]) => count);
    if (counts.length) {
      const rate = digits(this.feed.history.at(-1).vectors);
      const each = counts.map(([use, count]) => `${digits(count)} ${USES[use]}`).join(", ");
      said.push(`Prompts read for numbers: ${rate} a second; ${each} so far.`);
    }
    if (work.batches) {
      const { running, rows, rows_limit: limit, files, bytes: stored } = work.batches;
      const busy = running ? `${digits(running)} running with ${digits(rows)} of ${plural(limit, "row")}` : "none running";
      said.push(`Batches: ${busy}; ${plural(files, "file")}, ${bytes(stored)}.`);
    }
    const node = byId("work");
    node.hidden = !said.length;
    setText(node, said.join(" "));
  }

  showAdapters() {
    const { fleet } = this.feed;
    if (fleet === null) return;
    const wanted = this.filter.value.trim().toLowerCase();
    const all = adapterRows(fleet, this.names, this.sizes);
    const shown = all.filter((row) => row.title.toLowerCase().includes(wanted) || row.digest?.startsWith(wanted));
    for (const row of shown) row.selected = this.isPicked(row);
    const nothing = all.length ? `No adapter has “${this.filter.value}” in its name.` : "No adapter is registered or loaded yet. Name one in a request, or register it.";
    this.list.show(shown, nothing);
    this.card.show(this.chosen(fleet));
    setText(byId("adapters-count"), shown.length === all.length ? digits(all.length) : `${digits(shown.length)} of ${digits(all.length)}`);
  }

  /** By its content; by its name while that is not known. */
  isPicked({ digest, title }) {
    return this.picked === null ? title === this.pickedName : digest === this.picked;
  }

  /** The registered adapter that was chosen, also by one of its versions. */
  chosen(fleet) {
    const named = fleet.adapters.find((adapter) => spelled(adapter) === this.pickedName) ?? null;
    if (named || this.picked === null) return named; // also when a change gave it another content
    const means = ({ digest, rollout }) =>
      digest === this.picked || (rollout?.versions ?? []).some((version) => version.digest === this.picked);
    return fleet.adapters.find(means) ?? null;
  }

  showErrors(fleet) {
    const node = byId("errors");
    const problems = fleet.problems.map((text) => ({ time: null, count: 1, cause: "adapters file", message: text, path: "", request_id: "" }));
    const all = [...problems, ...fleet.errors];
    const key = all.map((e) => `${e.time}${e.message}${e.count}`).join("|");
    if (node.dataset.key === key) return;
    node.dataset.key = key;
    if (!all.length) {
      node.replaceChildren(h("p", { class: "empty" }, "Nobody was told of an error since the router started."));
      return;
    }
    node.replaceChildren(h("ol", { class: "error-list", tabindex: "0", "aria-labelledby": "errors-title" }, ...all.map(errorRow)));
  }
}

function noticeOf({ state, problem, status, fleet }) {
  if (state === "locked") {
    if (status === 403) return ["The fleet is not shown here", sentence(problem), false];
    if (keys.get("admin")) return ["The admin key is wrong", "The router does not take it. Type another.", true];
    return ["The fleet wants the admin key", "It stays in this tab, and the playground does not need it.", true];
  }
  if (state === "reconnecting") return ["Reconnecting", problem, false];
  if (fleet === null) return ["Connecting", "Waiting for the router's first picture.", false];
  if (!fleet.workers.length) return ["No workers", "The router was started without a worker: name some with --worker.", false];
  return null;
}

const sentence = (text) => `${text[0].toUpperCase()}${text.slice(1)}.`;

function tile(title) {
  const value = h("span", { class: "value" });
  const detail = h("span", { class: "muted" });
  const chart = h("canvas", { class: "tile-chart", "aria-hidden": "true" });
  const node = h("div", { class: "tile", role: "listitem" }, h("span", { class: "title" }, title), value, detail, chart);
  return {
    node,
    show(now, text, values = null, top = 1) {
      setText(value, now);
      setText(detail, text);
      chart.hidden = values === null;
      if (values) sparkline(chart, values, top);
    },
  };
}

const series = (history, name) => history.map((point) => point[name]);

/** Registered adapters by name, then what is in memory without a name. */
function adapterRows(fleet, names, sizes) {
  const where = new Map();
  for (const worker of fleet.workers) {
    for (const place of worker.places) {
      const found = where.get(place.digest) ?? { device: 0, loading: 0, host: 0, running: 0, pinned: false };
      found.device += place.device === "ready" ? 1 : 0;
      found.loading += place.device === "loading" ? 1 : 0;
      found.host += place.host === "ready" ? 1 : 0;
      found.running += worker.in_use[place.digest] ?? 0;
      const spans = place.device_spans.length ? place.device_spans : place.host_spans;
      const held = spans.reduce((sum, [, count]) => sum + count, 0) * worker.extent_bytes;
      if (place.slab_bytes || held) sizes.set(place.digest, place.slab_bytes || held);
      found.pinned ||= place.pinned;
      where.set(place.digest, found);
    }
  }
  const rows = fleet.adapters.map((adapter) => row(adapter, where.get(adapter.digest), names, sizes));
  const registered = new Set(fleet.adapters.map((adapter) => adapter.digest));
  for (const [digest, found] of where) {
    if (registered.has(digest)) continue;
    const unnamed = { name: names.of(digest), digest, state: "ready", pinned: false, ranks: null, nbytes: null, error: null };
    rows.push(row(unnamed, found, names, sizes));
  }
  return rows;
}

function row(adapter, found, names, sizes) {
  const detail = [];
  if (adapter.base) detail.push(adapter.base);
  if (adapter.ranks?.length) detail.push(`rank ${ranks(adapter.ranks)}`);
  const size = sizes.get(adapter.digest) ?? adapter.nbytes;
  if (size) detail.push(bytes(size));
  if (adapter.partial) detail.push(partialText(adapter.partial));
  detail.push(adapter.error ?? whereText(found));
  const [badge, tone] = badgeOf(adapter, found);
  return {
    id: `${spelled(adapter)} ${adapter.digest}`,
    digest: adapter.digest,
    title: spelled(adapter),
    detail: detail.join(" · "),
    mark: adapter.digest ? names.mark(adapter.digest) : "var(--line)",
    badge,
    tone,
  };
}

function badgeOf(adapter, found) {
  if (adapter.error) return [adapter.state === "broken" ? "broken" : "error", "bad"];
  if (adapter.state === "unloading" || adapter.state === "unloaded") return [adapter.state, ""];
  if (adapter.rollout) return rolloutBadge(adapter.rollout);
  if (adapter.partial && !found?.loading && !found?.running) return ["partial", "warn"];
  if (found?.loading) return ["loading", "busy"];
  if (found?.running) return [`${digits(found.running)} active`, "busy"];
  return adapter.pinned || found?.pinned ? ["pinned", ""] : ["", ""];
}

/** Of an adapter of which targeted modules are missing. */
function partialText({ modules, targeted_modules, layers, targeted_layers }) {
  if (layers < targeted_layers) return `${digits(layers)} of ${plural(targeted_layers, "layer")}`;
  return `${digits(modules)} of ${plural(targeted_modules, "module")}`;
}

function ranks(all) {
  const [low, high] = [Math.min(...all), Math.max(...all)];
  return low === high ? `${low}` : `${low}–${high}`;
}

function whereText(found) {
  if (!found) return "not in memory";
  if (found.device) return `on ${plural(found.device, "device")}`;
  return found.host ? `in host memory of ${plural(found.host, "worker")}` : "on its way";
}

function errorRow(error) {
  const times = error.count > 1 ? h("span", { class: "badge" }, `×${digits(error.count)}`) : null;
  const when = error.time === null ? "" : clockTime(error.time);
  const source = [error.path, error.request_id && `request ${error.request_id}`].filter(Boolean).join(" · ");
  return h(
    "li",
    {},
    h("time", { class: "muted" }, when),
    h("div", {}, h("strong", {}, error.cause.replaceAll("_", " ")), times, h("p", {}, error.message), h("p", { class: "muted small" }, source)),
  );
}
