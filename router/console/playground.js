// One prompt through several models side by side.

import { keys, request } from "./api.js";
import { Column } from "./column.js";
import { announce, byId, digits, h, plural, setText } from "./dom.js";
import { AnswerForm } from "./form.js";
import { PromptImages } from "./images.js";
import { VirtualList } from "./list.js";

// A browser keeps six connections to a server, and the fleet's stream is one of them.
const AT_ONCE = 5;
const MOST = 8;
const FIELDS = { "max-tokens": "max_tokens", temperature: "temperature", "top-p": "top_p", seed: "seed" };
// Adapters of the demo by the form of their answers.
const TAUGHT = { schema: "json", tools: "tools" };
const DEFAULTS = { "max-tokens": "128", temperature: "0", "top-p": "", seed: "" };

export class Playground {
  constructor(feed, names, openKeys) {
    this.feed = feed;
    this.names = names;
    this.openKeys = openKeys;
    this.models = []; // names; the base first
    this.parents = new Map(); // a model -> its base; null = it is one
    this.several = false; // bases
    this.chosen = [];
    this.columns = new Map();
    this.controller = null;
    this.form = new AnswerForm((kind) => this.suit(kind));
    this.images = new PromptImages();
    byId("mode").addEventListener("change", () => this.images.allow(this.blindness()));
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
    byId("playground-form").addEventListener("keydown", (event) => {
      const isRun = event.key === "Enter" && (event.ctrlKey || event.metaKey);
      if (isRun && !event.defaultPrevented) byId("playground-form").requestSubmit();
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
      this.parents = new Map(data.map((model) => [model.id, model.parent]));
      this.several = data.filter((model) => model.parent === null).length > 1;
      if (!this.chosen.length) this.chosen = this.models.slice(0, 3);
      this.problem = null;
    } catch (error) {
      this.problem = error.message;
    }
    const gives = this.feed.fleet?.base?.gives;
    if (gives && !gives.includes("text")) this.problem = `The model writes no text. It gives ${gives.join(", ")}.`;
    if (this.feed.fleet?.base && !this.feed.fleet.base.chat && !this.touched) byId("mode").value = "text";
    this.showModels();
    this.showColumns();
  }

  /** Models that nobody chose give way to the one that was taught the form, where it is served. */
  suit(kind) {
    if (this.running || this.chosen.join() !== this.models.slice(0, 3).join()) return;
    const taught = TAUGHT[kind];
    if (!this.models.includes(taught)) return;
    this.chosen = [taught];
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
        detail: this.isBase(name) ? "base" : this.several ? (this.parents.get(name) ?? "") : "",
        mark: this.markOf(name),
        selected: this.chosen.includes(name),
        badge: this.chosen.includes(name) ? "✓" : "",
      }));
    const unknown = wanted ? `Enter adds “${wanted}”, a reference such as org/name.` : "No model is served yet.";
    this.list.show(items, this.problem ?? unknown);
    byId("chosen").replaceChildren(...this.chosen.map((name) => this.chip(name)));
  }

  isBase(name) {
    return this.parents.get(name) === null;
  }

  /** Why the chosen models get no images; "" = they do, as far as is known. */
  blindness() {
    if (byId("mode").value !== "chat") return "Images need the prompt as a chat message.";
    const { base, bases } = this.feed.fleet ?? {};
    const wanted = new Set(this.chosen.map((name) => this.parents.get(name) ?? name));
    const models = bases ? bases.filter(({ name }) => wanted.has(name)).map(({ model }) => model) : [base];
    const blind = models.find((model) => model && !model.images);
    return blind ? `${blind.name} reads no images.` : "";
  }

  markOf(name) {
    if (this.isBase(name)) return "var(--muted)";
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
    this.images.allow(this.blindness());
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
    this.images.allow(this.blindness());
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
    const mode = byId("mode").value;
    const form = this.form.read(mode);
    if (!form) return announce(this.form.problem);
    const images = this.images.urls;
    if (images.length && this.blindness()) return announce(`${this.blindness()} Remove them, or choose otherwise.`);
    this.remember();
    this.controller = new AbortController();
    this.moved();
    const call = { prompt: prompt.value, mode, parameters: this.parameters(), form, images };
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

  // Sharing: prompt, models, parameters and form after the #, which browsers send to nobody

  remember() {
    const query = new URLSearchParams();
    for (const name of this.chosen) query.append("model", name);
    query.set("prompt", byId("prompt").value);
    query.set("as", byId("mode").value);
    for (const id of Object.keys(FIELDS)) if (byId(id).value !== DEFAULTS[id]) query.set(id, byId(id).value);
    this.form.remember(query);
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
    this.form.restore(given);
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
    announce("The link holds prompt, models, parameters and form, and neither images nor key.");
    setTimeout(() => setText(button, "Copy link"), 2500);
  }
}
