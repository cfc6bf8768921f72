// One adapter's card: its versions and their shares, what the guards say of them, its history.

import { keys, request } from "./api.js";
import { pathOf } from "./changes.js";
import { byId, dateTime, digits, h, percent, plural, seconds, setText, shortDigest, shortReference, shortTime } from "./dom.js";
import { spelled } from "./names.js";

const EVERY_MS = 2000;
const SHOWN_CHANGES = 8;
const STATES = { warming: "warming", serving: "serving", rolled_back: "taken back", idle: "no share" };
const TONES = { warming: "busy", serving: "good", rolled_back: "bad", idle: "" };

export class RolloutCard {
  constructor(names, changes) {
    this.names = names;
    this.changes = changes;
    this.adapter = null;
    this.name = null; // as it is spelled
    this.told = null; // what was asked of the router, beside the fleet's picture
    this.node = byId("adapter-card");
    this.title = h("h3");
    this.state = h("span", { class: "badge" });
    this.problem = h("p", { class: "card-note", "data-tone": "bad" });
    this.partial = h("p", { class: "card-note", "data-tone": "warn" });
    this.used = h("p", { class: "card-note muted" });
    this.shares = h("div", { class: "shares", role: "img" });
    this.wanted = h("div", { class: "shares wanted", "aria-hidden": "true" });
    this.versions = h("ul", { class: "versions" });
    this.guards = h("p", { class: "muted small" });
    this.rollout = h("div", { class: "rollout" }, this.shares, this.wanted, this.versions, this.guards);
    this.history = h("ol", { class: "history" });
    this.actions = h("div", { class: "actions" });
    this.node.append(
      h("div", { class: "card-head" }, this.title, this.state),
      this.problem,
      this.partial,
      this.used,
      this.actions,
      this.rollout,
      h("h4", {}, "History"),
      this.history,
    );
  }

  /** adapter: of the fleet's picture, or null. Called with every picture. */
  show(adapter) {
    const name = adapter === null ? null : spelled(adapter);
    if (name !== this.name) {
      this.told = null;
      this.askedAt = -Infinity;
    }
    this.name = name;
    this.adapter = adapter;
    this.node.hidden = adapter === null;
    if (adapter === null) return;
    this.draw();
    if (performance.now() - this.askedAt >= EVERY_MS) this.ask(adapter);
  }

  /** What the picture does not hold. */
  async ask(adapter) {
    const { name } = this;
    this.askedAt = performance.now();
    const told = await asked(adapter).catch(() => null); // the feed says what is wrong
    if (told === null || this.name !== name) return;
    this.told = told;
    this.draw();
  }

  draw() {
    const { adapter, told } = this;
    const key = JSON.stringify([adapter, told]);
    if (this.key === key) return;
    this.key = key;
    const { rollout } = adapter;
    const offered = `${this.name} ${adapter.pinned} ${Boolean(rollout)}`;
    if (this.actions.dataset.key !== offered) {
      this.actions.dataset.key = offered; // a button that somebody has in focus stays
      this.actions.replaceChildren(...this.changes.buttons(adapter));
    }
    setText(this.title, this.name);
    const [badge, tone] = adapter.state === "broken" ? ["broken", "bad"] : rollout ? rolloutBadge(rollout) : ["no rollout", ""];
    setText(this.state, badge);
    this.state.dataset.tone = tone;
    this.note(this.problem, adapter.error ?? "");
    this.note(this.partial, adapter.partial?.message ?? "");
    this.note(this.used, told?.used ?? "");
    this.rollout.hidden = !rollout;
    if (rollout) this.drawRollout(rollout, told?.rollout ?? null);
    this.drawHistory(told?.history ?? []);
  }

  note(node, text) {
    node.hidden = !text;
    setText(node, text && `${text[0].toUpperCase()}${text.slice(1)}`);
  }

  drawRollout(rollout, told) {
    const { versions } = rollout;
    const live = sharesOf(versions, "live_weight");
    const wanted = sharesOf(versions, "weight");
    this.bar(this.shares, versions, live);
    this.bar(this.wanted, versions, wanted);
    this.wanted.hidden = live.every((share, i) => share === wanted[i]);
    this.shares.setAttribute("aria-label", versions.map((v, i) => `${v.reference} ${percent(live[i])}`).join(", "));
    const measured = new Map((told?.measured ?? []).map((one) => [one.digest, one]));
    this.versions.replaceChildren(
      ...versions.map((version, i) => this.version(rollout, version, i, live[i], wanted[i], measured.get(version.digest))),
    );
    setText(this.guards, guardsText(rollout.guards, told?.measured_by === "this_router"));
  }

  bar(node, versions, shares) {
    const parts = versions.map((version, i) => {
      const part = h("span", { class: "share" });
      part.style.flexGrow = String(shares[i]);
      part.style.background = this.names.mark(version.digest);
      part.hidden = !shares[i];
      return part;
    });
    node.replaceChildren(...parts);
  }

  version(rollout, version, i, live, wanted, measured) {
    const mark = h("i", { class: "mark", "aria-hidden": "true" });
    mark.style.background = this.names.mark(version.digest);
    const share = live === wanted ? percent(live) : `${percent(live)} → ${percent(wanted)}`;
    const state = i === 0 ? "old" : STATES[version.state];
    const said = version.why ? `${version.why}.` : verdictText(rollout.guards, version, i, measured);
    return h(
      "li",
      { "data-state": version.state },
      mark,
      h("span", { class: "reference", title: `${version.reference}\n${version.digest}` }, shortReference(version.reference)),
      h("strong", {}, share),
      h(
        "p",
        { class: "small" },
        h("span", { class: "state", "data-tone": i === 0 ? "" : TONES[version.state] }, state),
        h("span", { class: "muted" }, measuredText(measured)),
      ),
      said ? h("p", { class: "small verdict", "data-tone": toneOf(version, measured) }, said) : null,
    );
  }

  drawHistory(changes) {
    const rows = changes.slice(0, SHOWN_CHANGES).map((change) =>
      h(
        "li",
        {},
        h("time", { class: "muted", title: dateTime(change.since) }, shortTime(change.since)),
        h(
          "div",
          {},
          h("strong", {}, change.action),
          h("span", { class: "muted" }, change.by ? ` by ${change.by}` : ""),
          h("p", { class: "muted small", title: `${change.ref}\n${change.digest}` }, change.note || noteOf(change)),
        ),
      ),
    );
    if (!rows.length) rows.push(h("li", { class: "muted" }, "Nothing yet."));
    this.history.replaceChildren(...rows);
  }
}

const noteOf = ({ digest, ref }) => `${shortDigest(digest)} ${shortReference(ref)}`;

async function asked(adapter) {
  const { rollout } = adapter;
  const ask = (what) => request(pathOf(adapter, `/${what}`), { key: keys.get("admin") }).then((response) => response.json());
  // Whether there is a rollout may have changed since the picture was drawn.
  const [history, measured, used] = await Promise.all([
    ask("history"),
    rollout ? ask("rollout").catch(() => null) : null,
    usageOf(adapter).catch(() => null),
  ]);
  return { history: history.data, rollout: measured, used };
}

/** Today's use of an adapter, by all that may use it. */
async function usageOf({ name, tenant }) {
  const query = new URLSearchParams({ adapter: name, ...(tenant ? { tenant } : {}) });
  const { data, currency } = await request(`/v1/usage?${query}`, { key: keys.get("admin") }).then((response) => response.json());
  const sum = (field) => data.reduce((total, row) => total + row[field], 0);
  const texts = [plural(sum("requests"), "request"), `${seconds(sum("device_s"))} of devices`];
  if (currency) texts.push(`${sum("cost").toPrecision(3)} ${currency}`);
  return `Today: ${texts.join(" · ")}.`;
}

/** A word for the whole, as in the list of adapters. */
export function rolloutBadge(rollout) {
  const [, ...others] = rollout.versions;
  const states = new Set(others.map((version) => version.state));
  if (states.has("warming")) return ["warming", "busy"];
  if (states.has("rolled_back") && !states.has("serving")) return ["taken back", "bad"];
  const [old] = sharesOf(rollout.versions, "live_weight");
  return old === 1 ? ["no share yet", ""] : [`${percent(1 - old)} new`, "busy"];
}

/** Of each version; the old one serves when all weights are 0. */
function sharesOf(versions, weight) {
  const total = versions.reduce((sum, version) => sum + version[weight], 0);
  return versions.map((version, i) => (total ? version[weight] / total : i === 0 ? 1 : 0));
}

function measuredText(measured) {
  if (!measured) return "";
  const texts = [plural(measured.requests, "request")];
  if (measured.requests) texts.push(`${percent(measured.failed / measured.requests)} failed`);
  if (measured.first_token_p95_s !== null) texts.push(`p95 ${seconds(measured.first_token_p95_s)}`);
  if (measured.scores) texts.push(scoresText(measured.scores));
  return ` · ${texts.join(" · ")}`;
}

function scoresText({ count, mean, old_count, old_mean, p }) {
  const score = (n, value) => (n ? `${value.toFixed(2)} of ${n}` : "none");
  const said = `score ${score(count, mean)}, old ${score(old_count, old_mean)}`;
  return p === null || p > 0.5 ? said : `${said} (p ${p.toPrecision(1)})`;
}

function verdictText(guards, version, i, measured) {
  if (i === 0 || !guards || !measured?.verdict) return version.state === "warming" ? "Waits until it is on enough devices." : "";
  if (measured.verdict === "holds") return "No worse than the old one.";
  if (measured.verdict === "breaks") return "Worse than the old one: it goes back.";
  return `Judged after ${plural(guards.min_requests, "request")}.`;
}

const toneOf = (version, measured) =>
  version.state === "rolled_back" || measured?.verdict === "breaks" ? "bad" : measured?.verdict === "holds" ? "good" : "";

function guardsText(guards, alone) {
  if (!guards) return "No guards: nothing goes back by itself.";
  const limits = [];
  if (guards.max_error_increase !== null) limits.push(`${percent(guards.max_error_increase)} more failures`);
  if (guards.max_latency_ratio !== null) limits.push(`${digits(guards.max_latency_ratio)} × the latency`);
  const drop = guards.max_score_drop;
  const scores = drop === null ? "" : ` At any time: at a lower mean score${drop ? `, by more than ${drop.toFixed(2)}` : ""}.`;
  const said = limits.length ? `Goes back at ${limits.join(" or ")}, in ${plural(guards.window_s, "second")}.` : "Nothing is judged.";
  return alone ? `${said} Without Redis: counted by this router alone.` : said + scores;
}
