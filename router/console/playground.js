// One prompt through several models side by side.

import { ApiError, keys, request } from "./api.js";
import { announce, byId, digits, h, plural, seconds, setText } from "./dom.js";
import { VirtualList } from "./list.js";
import { generate } from "./stream.js";

// A browser keeps six connections to a server, and the fleet's stream is one of them.
const AT_ONCE = 5;
const MOST = 8;
const FIELDS = { "max-tokens": "max_tokens", temperature: "temperature", "top-p": "top_p", seed: "seed" };
const DEFAULTS = { "max-tokens": "128", temperature: "0", "top-p": "", seed: "" };
const FINISHES = { stop: "finished", length: "cut at max tokens", error: "failed" };

export class Playground {
  constructor(feed, names, openKeys) {
    this.feed = feed;
    this.names = names;
    this.openKeys = openKeys;
    this.models = []; // names; the base first
    this.chosen = [];
    this.columns = new Map();
    this.controller = null;
    this.list = new VirtualList("Models", 34, { multiple: true, empty: "", onPick: (item) => this.toggle(item.id) });
    byId("models").append(this.list.node);
    this.filter = byId("model-filter");
    this.filter.addEventListener("input", () => this.showModels());
    this.filter.addEventListener("keydown", (event) => this.filterKey(event));
    byId("playground-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    byId("stop").addEventListener("click", () => this.stop());
    byId("share").addEventListener("click", () => this.share());
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("playground-form").requestSubmit();
    });
    for (const [id, value] of Object.entries(DEFAULTS)) byId(id).value = value;
    this.restore();
    this.showColumns();
  }

  get running() {
    return this.controller !== null;
  }

  // Models

  /** Asks for the names; they are public to whoever may generate. */
  async learn() {
    try {
      const answer = await request("v1/models", { key: keys.get("api") });
      const { data } = await answer.json();
      this.models = data.map((model) => model.id);
      this.base = data.find((model) => model.parent === null)?.id ?? null;
      if (!this.chosen.length) this.chosen = this.models.slice(0, 3);
      this.problem = null;
    } catch (error) {
      this.problem = error.message;
    }
    if (this.feed.fleet?.base && !this.feed.fleet.base.chat && !this.touched) byId("mode").value = "text";
    this.showModels();
    this.showColumns();
  }

  showModels() {
    const wanted = this.filter.value.trim();
    const low = wanted.toLowerCase();
    const named = [...new Set([...this.models, ...this.chosen])];
    const items = named
      .filter((name) => name.toLowerCase().includes(low))
      .map((name) => ({
        id: name,
        title: name,
        detail: name === this.base ? "base" : "",
        mark: this.markOf(name),
        selected: this.chosen.includes(name),
        badge: this.chosen.includes(name) ? "✓" : "",
      }));
    const unknown = wanted ? `Enter adds “${wanted}”, a reference such as org/name.` : "No model is served yet.";
    this.list.show(items, this.problem ?? unknown);
    byId("chosen").replaceChildren(...this.chosen.map((name) => this.chip(name)));
  }

  markOf(name) {
    if (name === this.base) return "var(--muted)";
    // Whose key it is, and so which of several it means, is not known here.
    const found = this.feed.fleet?.adapters.filter((adapter) => adapter.name === name) ?? [];
    const digest = found.length === 1 ? found[0].digest : null;
    return digest ? this.names.mark(digest) : "var(--line-strong)";
  }

  chip(name) {
    const remove = () => {
      this.toggle(name);
      (byId("chosen").querySelector("button") ?? this.filter).focus();
    };
    return h("button", { type: "button", class: "chip", "aria-label": `Remove ${name}`, onclick: remove }, name, h("span", { "aria-hidden": "true" }, "×"));
  }

  toggle(name) {
    if (this.running) return;
    if (this.chosen.includes(name)) this.chosen = this.chosen.filter((other) => other !== name);
    else if (this.chosen.length >= MOST) return announce(`At most ${MOST} models at once.`);
    else this.chosen = [...this.chosen, name];
    announce(`${plural(this.chosen.length, "model")} chosen`);
    this.showModels();
    this.showColumns();
  }

  filterKey(event) {
    const name = this.filter.value.trim();
    if (event.key === "Enter") {
      event.preventDefault();
      const sole = this.list.items.length === 1 ? this.list.items[0].id : null;
      const wanted = this.models.includes(name) ? name : (sole ?? (this.list.items.length ? null : name));
      if (!wanted) return;
      this.filter.value = "";
      if (this.chosen.includes(wanted)) this.showModels();
      else this.toggle(wanted);
    } else if (event.key === "ArrowDown") {
      event.preventDefault();
      this.list.box.focus();
    }
  }

  // Answers

  showColumns() {
    const node = byId("columns");
    if (!this.chosen.length) {
      this.columns.clear();
      node.replaceChildren(h("p", { class: "empty" }, "Choose one or more models, then run a prompt through all of them at once."));
      return;
    }
    const before = this.columns;
    this.columns = new Map(this.chosen.map((name) => [name, before.get(name) ?? new Column(name)]));
    this.showMarks();
    const wanted = [...this.columns.values()].map((column) => column.node);
    if (wanted.length !== node.children.length || wanted.some((child, i) => node.children[i] !== child)) node.replaceChildren(...wanted);
  }

  /** Contents, and with them colours, become known as adapters are used. */
  showMarks() {
    for (const column of this.columns.values()) column.mark.style.background = this.markOf(column.name);
    for (const item of this.list.items) item.mark = this.markOf(item.id);
    this.list.draw();
  }

  async run() {
    const prompt = byId("prompt");
    if (this.running) return;
    if (!prompt.value.trim()) {
      prompt.focus();
      return announce("Write a prompt first.");
    }
    if (!this.chosen.length) {
      this.filter.focus();
      return announce("Choose a model first.");
    }
    this.remember();
    this.controller = new AbortController();
    this.moved();
    const call = { prompt: prompt.value, mode: byId("mode").value, parameters: this.parameters() };
    const waiting = [...this.columns.values()];
    waiting.forEach((column) => column.reset());
    const work = async () => {
      for (let column = waiting.shift(); column; column = waiting.shift()) {
        await column.run(call, this.controller.signal);
        if (column.status === 401) this.wantsKey = true;
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, work));
    this.controller = null;
    this.moved();
    const good = [...this.columns.values()].filter((column) => column.state === "done").length;
    announce(`${digits(good)} of ${plural(this.columns.size, "answer")} finished.`);
    if (this.wantsKey) this.openKeys("api");
    this.wantsKey = false;
  }

  stop() {
    this.controller?.abort();
  }

  moved() {
    byId("run").disabled = this.running;
    byId("stop").disabled = !this.running;
    setText(byId("run"), this.running ? "Running…" : "Run");
    if (this.running && document.activeElement === document.body) byId("stop").focus();
  }

  parameters() {
    const parameters = {};
    for (const [id, name] of Object.entries(FIELDS)) {
      const value = byId(id).value.trim();
      if (value !== "") parameters[name] = Number(value);
    }
    return parameters;
  }

  // Sharing: prompt, models and parameters after the #, which browsers send to nobody

  remember() {
    const query = new URLSearchParams();
    for (const name of this.chosen) query.append("model", name);
    query.set("prompt", byId("prompt").value);
    query.set("as", byId("mode").value);
    for (const id of Object.keys(FIELDS)) if (byId(id).value !== DEFAULTS[id]) query.set(id, byId(id).value);
    history.replaceState(null, "", `#playground?${query}`);
  }

  restore() {
    const [view, query] = location.hash.slice(1).split(/\?(.*)/s);
    if (view !== "playground" || !query) return;
    const given = new URLSearchParams(query);
    this.chosen = [...new Set(given.getAll("model"))].slice(0, MOST);
    byId("prompt").value = given.get("prompt") ?? "";
    if (["chat", "text"].includes(given.get("as"))) {
      byId("mode").value = given.get("as");
      this.touched = true;
    }
    for (const id of Object.keys(FIELDS)) if (given.has(id)) byId(id).value = given.get(id);
    byId("parameters").open = Object.keys(FIELDS).some((id) => given.has(id));
  }

  async share() {
    this.remember();
    const button = byId("share");
    try {
      await navigator.clipboard.writeText(location.href);
      setText(button, "Copied");
    } catch {
      setText(button, "It is in the address bar");
    }
    announce("The link holds prompt, models and parameters, and no key.");
    setTimeout(() => setText(button, "Copy link"), 2500);
  }
}

class Column {
  constructor(name) {
    this.name = name;
    this.mark = h("span", { class: "mark" });
    this.stateText = h("span", { class: "state" });
    this.figures = { ttft: h("dd"), rate: h("dd"), tokens: h("dd") };
    this.output = h("div", { class: "output", tabindex: "0", role: "log", "aria-live": "off", "aria-label": `Answer of ${name}` });
    this.copy = h("button", { class: "quiet small", type: "button", "aria-label": `Copy the answer of ${name}`, onclick: () => this.copyText() }, "Copy");
    const figure = (title, dd) => h("div", {}, h("dt", {}, title), dd);
    this.node = h(
      "article",
      { class: "column", "aria-label": name },
      h("header", {}, this.mark, h("h3", { title: name }, name), this.stateText),
      this.output,
      h("footer", {}, h("dl", { class: "figures" }, figure("first token", this.figures.ttft), figure("tokens/s", this.figures.rate), figure("tokens", this.figures.tokens)), this.copy),
    );
    this.reset("");
  }

  reset(text = "waiting") {
    this.text = "";
    this.status = 0;
    this.output.replaceChildren();
    this.move(text === "" ? "idle" : "waiting", text);
    for (const dd of Object.values(this.figures)) setText(dd, "–");
  }

  move(state, text) {
    this.state = state;
    this.node.dataset.state = state;
    setText(this.stateText, text);
  }

  async run(call, signal) {
    if (signal.aborted) return this.move("stopped", "stopped");
    this.move("running", "sent");
    try {
      const reason = await generate(this.name, call, signal, (text) => this.add(text), (told) => this.tell(told));
      this.move("done", FINISHES[reason] ?? reason);
    } catch (error) {
      this.fail(error, signal);
    }
  }

  fail(error, signal) {
    if (signal.aborted) return this.move("stopped", "stopped");
    this.status = error instanceof ApiError ? error.status : 0;
    this.move("failed", this.status ? `error ${this.status}` : "failed");
    this.output.append(h("p", { class: "failure" }, error.message));
  }

  add(text) {
    if (this.state === "running") setText(this.stateText, "writing");
    this.text += text;
    const atEnd = this.output.scrollTop + this.output.clientHeight >= this.output.scrollHeight - 4;
    this.output.append(text);
    if (atEnd) this.output.scrollTop = this.output.scrollHeight;
  }

  tell({ ttft, tokens, exact, rate }) {
    setText(this.figures.ttft, seconds(ttft / 1000));
    setText(this.figures.tokens, digits(tokens));
    setText(this.figures.rate, rate === null ? "–" : `${exact ? "" : "~"}${digits(rate)}`);
  }

  async copyText() {
    try {
      await navigator.clipboard.writeText(this.text);
      announce("Copied.");
    } catch {
      getSelection().selectAllChildren(this.output);
      announce("Selected: copy it with the keyboard.");
    }
  }
}
