// Follows /v1/fleet: one picture a second, put together from its changes, and a short history.

import { ApiError, events, keys, request } from "./api.js";

const SILENCE_MS = 6000;
const LONGEST_WAIT_MS = 10000;
const HISTORY = 90; // points, one a second

/**
 * `state`: connecting, live, reconnecting, locked (a key is wanted) or paused (the tab is hidden).
 * `onChange` is called after every event and every change of state.
 */
export class FleetFeed {
  constructor(onChange) {
    this.state = "connecting";
    this.problem = "";
    this.status = 0;
    this.fleet = null;
    this.history = [];
    this.rates = new Map(); // worker's url -> tokens/s, newest last
    this.onChange = onChange;
    this.wake = () => {};
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** Asks again at once: a key was typed, or the tab is seen again. */
  restart() {
    this.controller?.abort();
    this.wake();
  }

  async run() {
    let wait = 500;
    for (;;) {
      if (document.hidden) {
        this.move("paused", "");
        await this.pause(2 ** 31 - 1);
        continue;
      }
      const before = this.fleet;
      try {
        await this.follow();
        this.move("reconnecting", "The router closed the stream.");
      } catch (error) {
        this.fail(error);
      }
      wait = this.fleet === before ? Math.min(wait * 2, LONGEST_WAIT_MS) : 500;
      if (!document.hidden) await this.pause(this.state === "locked" ? 2 ** 31 - 1 : wait);
    }
  }

  fail(error) {
    if (error.name === "AbortError") {
      this.move("reconnecting", "The router fell silent.");
    } else if (error instanceof ApiError) {
      this.status = error.status;
      const locked = error.status === 401 || error.status === 403;
      this.move(locked ? "locked" : "reconnecting", error.message);
    } else {
      this.move("reconnecting", "The connection was lost.");
    }
  }

  move(state, problem) {
    this.state = this.fleet === null && state === "reconnecting" && !problem ? "connecting" : state;
    this.problem = problem;
    this.onChange();
  }

  pause(ms) {
    return new Promise((resolve) => {
      const timer = setTimeout(resolve, ms);
      this.wake = () => {
        clearTimeout(timer);
        resolve();
      };
    });
  }

  async follow() {
    this.controller = new AbortController();
    let timer;
    const alive = () => {
      clearTimeout(timer);
      timer = setTimeout(() => this.controller.abort(), SILENCE_MS);
    };
    alive();
    try {
      const response = await request("v1/fleet", {
        key: keys.get("admin"),
        headers: { accept: "text/event-stream" },
        signal: this.controller.signal,
      });
      for await (const data of events(response, alive)) this.take(JSON.parse(data));
    } finally {
      clearTimeout(timer);
    }
  }

  take(next) {
    const before = this.fleet;
    const known = new Map((before?.workers ?? []).map((worker) => [worker.url, worker]));
    for (const worker of next.workers) worker.places ??= known.get(worker.url)?.places ?? [];
    next.adapters ??= before?.adapters ?? [];
    this.remember(next, before, known);
    this.fleet = next;
    this.move("live", "");
  }

  remember(next, before, known) {
    const elapsed = before ? Math.max(next.time - before.time, 0.2) : 1;
    let tokens = 0;
    for (const worker of next.workers) {
      const was = known.get(worker.url);
      const made = was ? worker.output_tokens - was.output_tokens : 0;
      worker.rate = made > 0 ? made / elapsed : 0; // an engine that restarts counts from zero
      tokens += worker.rate;
      push(this.rates, worker.url, worker.rate);
    }
    for (const url of [...this.rates.keys()]) {
      if (!next.workers.some((worker) => worker.url === url)) this.rates.delete(url);
    }
    const total = sum(next.workers, "kv_pages");
    const used = total - sum(next.workers, "kv_pages_free");
    this.history.push({
      tokens,
      waiting: next.router.queue + sum(next.workers, "waiting"),
      running: sum(next.workers, "running"),
      kv: total ? used / total : 0,
      vectors: before ? Math.max(0, vectorCount(next) - vectorCount(before)) / elapsed : 0,
      errors: errorCount(next) - (before ? errorCount(before) : errorCount(next)),
    });
    if (this.history.length > HISTORY) this.history.shift();
  }
}

const sum = (items, name) => items.reduce((total, item) => total + item[name], 0);
const vectorCount = (fleet) => Object.values(fleet.work.vectors).reduce((total, count) => total + count, 0);
const errorCount = (fleet) => sum(fleet.errors, "count");

function push(map, key, value) {
  const values = map.get(key) ?? [];
  values.push(value);
  if (values.length > HISTORY) values.shift();
  map.set(key, values);
}
