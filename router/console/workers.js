// The workers: state, figures and arenas of each. Only those in sight are drawn.

import { Arena } from "./arena.js";
import { sparkline } from "./chart.js";
import { byId, bytes, digits, h, percent, plural, setAttribute, setText } from "./dom.js";

const STYLES = {
  roomy: { device: { rowHeight: 30, maxRows: 6 }, host: { rowHeight: 18, maxRows: 4 } },
  medium: { device: { rowHeight: 24, maxRows: 2 }, host: { rowHeight: 14, maxRows: 1 } },
  dense: { device: { rowHeight: 16, maxRows: 1 }, host: { rowHeight: 6, maxRows: 1 } },
};
const STATES = { ready: "ready", starting: "starting", draining: "draining", unreachable: "unreachable" };

export class Workers {
  constructor(names, onPick) {
    this.names = names;
    this.onPick = onPick;
    this.cards = new Map();
    this.list = byId("workers");
    this.sight = new IntersectionObserver((entries) => this.seen(entries), { rootMargin: "200px" });
    new ResizeObserver(() => this.redraw()).observe(this.list);
  }

  /** rates: tokens/s by worker's url. */
  show(workers, rates, picked) {
    const density = workers.length <= 3 ? "roomy" : workers.length <= 12 ? "medium" : "dense";
    this.list.dataset.density = density;
    const urls = new Set(workers.map((worker) => worker.url));
    for (const [url, card] of this.cards) {
      if (urls.has(url)) continue;
      this.sight.unobserve(card.node);
      card.node.remove();
      this.cards.delete(url);
    }
    for (const worker of workers) {
      const card = this.cards.get(worker.url) ?? this.add(worker.url);
      card.latest = [worker, rates.get(worker.url) ?? [], STYLES[density], picked];
      if (card.visible) card.show();
    }
  }

  add(url) {
    const card = new WorkerCard(this.names, this.onPick);
    card.node.dataset.url = url;
    this.cards.set(url, card);
    this.list.append(card.node);
    this.sight.observe(card.node);
    return card;
  }

  seen(entries) {
    for (const entry of entries) {
      const card = this.cards.get(entry.target.dataset.url);
      if (!card) continue;
      card.visible = entry.isIntersecting;
      if (card.visible) card.show();
    }
  }

  redraw() {
    for (const card of this.cards.values()) if (card.visible) card.show();
  }
}

class WorkerCard {
  constructor(names, onPick) {
    this.visible = false;
    this.latest = null;
    this.device = new Arena("device", names, onPick);
    this.host = new Arena("host", names, onPick);
    this.dot = h("i", { class: "dot", "aria-hidden": "true" });
    this.name = h("h3");
    this.state = h("span", { class: "state" });
    this.note = h("p", { class: "worker-note" });
    this.chart = h("canvas", { class: "spark", "aria-hidden": "true" });
    this.figures = Object.fromEntries(
      ["tokens/s", "running", "waiting", "KV cache"].map((name) => [name, h("dd")]),
    );
    this.captions = { device: h("span", { class: "caption" }), host: h("span", { class: "caption" }) };
    this.deviceName = h("span", { class: "tier" }, "Device");
    this.arenas = h(
      "div",
      { class: "arenas" },
      h("div", { class: "arena-head" }, this.deviceName, this.captions.device),
      this.device.canvas,
      h("div", { class: "arena-head" }, h("span", { class: "tier" }, "Host"), this.captions.host),
      this.host.canvas,
      (this.below = h("div", { class: "below" })),
    );
    const figures = Object.entries(this.figures).map(([name, dd]) => h("div", {}, h("dt", {}, name), dd));
    this.node = h(
      "li",
      { class: "worker" },
      h("div", { class: "worker-head" }, this.dot, this.name, this.state, h("dl", { class: "figures" }, ...figures), this.chart),
      this.note,
      this.arenas,
    );
  }

  show() {
    if (!this.latest) return;
    const [worker, rates, style, picked] = this.latest;
    this.node.dataset.state = worker.state;
    setText(this.name, worker.id ?? worker.url.replace(/^wss?:\/\//, ""));
    const state = STATES[worker.state] ?? worker.state;
    setText(this.state, worker.base ? `${state} · ${worker.base}` : state);
    setAttribute(this.name, "title", worker.url);
    this.figure("tokens/s", digits(worker.rate));
    this.figure("running", digits(worker.running));
    this.figure("waiting", digits(worker.waiting));
    this.figure("KV cache", worker.kv_pages ? percent(1 - worker.kv_pages_free / worker.kv_pages) : "–");
    this.notes(worker);
    const known = worker.extent_bytes > 0;
    this.arenas.hidden = !known;
    if (known) {
      const device = worker.device === "cpu" ? "Device (CPU)" : "GPU";
      setText(this.deviceName, worker.shards > 1 ? `${device}, one of ${worker.shards}` : device);
      const uses = worker.memory.map(([use, size]) => `${use} ${bytes(size)}`);
      setAttribute(this.deviceName, "title", uses.join(", "));
      this.arena("device", worker, style, picked);
      this.arena("host", worker, style, picked);
      this.floor(worker);
    }
    sparkline(this.chart, rates, 1);
  }

  arena(tier, worker, style, picked) {
    this[tier].show(worker, style[tier], picked);
    const { count, used, total } = this[tier];
    setText(this.captions[tier], `${plural(count, "adapter")} · ${bytes(used)} of ${bytes(total)}`);
  }

  /** Keys and values below the device: a bar for each place. */
  floor(worker) {
    const rows = worker.kept_pages.map(([where, used, total]) => {
      const caption = `${digits(used)} of ${plural(total, "page")}`;
      const name = where === "host" ? "KV in host memory" : "KV on disk";
      const head = h("div", { class: "arena-head" }, h("span", { class: "tier" }, name), h("span", { class: "caption" }, caption));
      return [head, h("progress", { max: total, value: used, "aria-label": `${name}: ${caption}` })];
    });
    this.below.replaceChildren(...rows.flat());
  }

  figure(name, text) {
    setText(this.figures[name], text);
  }

  notes(worker) {
    const notes = [];
    if (worker.problem) notes.push(worker.problem);
    if (worker.restarts) notes.push(`engine lost ${plural(worker.restarts, "time")}`);
    if (worker.preemptions) notes.push(plural(worker.preemptions, "preemption"));
    if (worker.draft_tokens) {
      const share = Math.round((100 * worker.accepted_draft_tokens) / worker.draft_tokens);
      notes.push(`${share} % of drafted tokens right`);
    }
    if (worker.evictions) notes.push(plural(worker.evictions, "eviction"));
    if (worker.places_left_out) notes.push(`${plural(worker.places_left_out, "adapter")} not shown`);
    setText(this.note, notes.join(" · "));
    this.note.hidden = !notes.length;
  }
}
