// Puts the console together: views, live state, theme, keys, shortcuts.

import { keys } from "./api.js";
import { BatchView } from "./batches.js";
import { forgetColours } from "./canvas.js";
import { announce, byId, setText } from "./dom.js";
import { FleetFeed } from "./fleet.js";
import { FleetView } from "./fleet-view.js";
import { Names } from "./names.js";
import { Playground } from "./playground.js";

const VIEWS = ["fleet", "playground", "batches"];
const THEMES = ["system", "light", "dark"];
const STATES = { connecting: "Connecting", live: "Live", reconnecting: "Reconnecting", locked: "Locked", paused: "Paused" };

const names = new Names();
const feed = new FleetFeed(() => show());
const fleetView = new FleetView(feed, names, () => openKeys("admin"));
const playground = new Playground(feed, names, openKeys);
const batchView = new BatchView(feed, () => openKeys("api"));

/** One of several bases: how many of its workers are ready, and who waits for them. */
function baseText(base) {
  const waits = base.queue + base.waiting;
  return `${base.name} ${base.workers_ready} of ${base.workers} ready${waits ? `, ${waits} waiting` : ""}`;
}

function show() {
  const live = byId("live");
  if (live.dataset.state !== feed.state) {
    live.dataset.state = feed.state;
    setText(live, STATES[feed.state]);
  }
  const { fleet } = feed;
  if (fleet) {
    names.learn(fleet);
    const ready = fleet.workers.filter((worker) => worker.state === "ready").length;
    const base = fleet.base ? fleet.base.name : "no model yet";
    const gives = fleet.base && !fleet.base.gives.includes("text") ? ` · ${fleet.base.gives.join(", ")}` : "";
    const one = `${base}${gives} · ${ready} of ${fleet.workers.length} ready`;
    setText(byId("model"), fleet.bases ? fleet.bases.map(baseText).join(" · ") : one);
  }
  if (typed && feed.status === 401 && feed.state === "locked") announce("The admin key is wrong.");
  if (feed.state === "locked" || feed.state === "live") typed = false;
  if (current === "fleet" || !fleet) fleetView.show();
  else if (current === "playground") playground.showMarks();
  if (!batchView.asked) batchView.ask();
}

// Views

let current = "fleet";

function go(view) {
  current = view;
  for (const name of VIEWS) {
    const tab = byId(`tab-${name}`);
    tab.setAttribute("aria-selected", String(name === view));
    tab.tabIndex = name === view ? 0 : -1;
    byId(`view-${name}`).hidden = name !== view;
  }
  document.body.dataset.view = view;
  if (!location.hash.startsWith(`#${view}`)) history.replaceState(null, "", `#${view}`);
  if (view === "playground") playground.learn();
  batchView.watch(view === "batches");
  show();
}

for (const view of VIEWS) byId(`tab-${view}`).addEventListener("click", () => go(view));
document.querySelector(".tabs").addEventListener("keydown", (event) => {
  if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
  const step = event.key === "ArrowRight" ? 1 : VIEWS.length - 1;
  const next = VIEWS[(VIEWS.indexOf(current) + step) % VIEWS.length];
  go(next);
  byId(`tab-${next}`).focus();
});
addEventListener("hashchange", () => {
  const view = location.hash.slice(1).split("?")[0];
  if (VIEWS.includes(view) && view !== current) go(view);
});

// Theme

function theme() {
  return document.documentElement.dataset.theme ?? "system";
}

function nextTheme() {
  const next = THEMES[(THEMES.indexOf(theme()) + 1) % THEMES.length];
  if (next === "system") {
    delete document.documentElement.dataset.theme;
    localStorage.removeItem("loraplex.theme");
  } else {
    document.documentElement.dataset.theme = next;
    localStorage.setItem("loraplex.theme", next);
  }
  repaint();
  announce(`Theme: ${next}`);
}

function repaint() {
  setText(byId("theme"), `Theme: ${theme()}`);
  forgetColours();
  show();
}

byId("theme").addEventListener("click", nextTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint);

// Keys

function openKeys(kind = "admin") {
  byId("admin-key").value = keys.get("admin");
  byId("api-key").value = keys.get("api");
  if (!byId("keys").open) byId("keys").showModal();
  byId(`${kind}-key`).focus();
}

let typed = false; // and not heard of yet

function useKeys() {
  byId("keys").close();
  typed = Boolean(keys.get("admin"));
  feed.restart();
  playground.learn();
  batchView.watch(current === "batches");
}

byId("open-keys").addEventListener("click", () => openKeys(current === "fleet" ? "admin" : "api"));
byId("keys-form").addEventListener("submit", (event) => {
  event.preventDefault();
  keys.set("admin", byId("admin-key").value.trim());
  keys.set("api", byId("api-key").value.trim());
  useKeys();
});
byId("forget-keys").addEventListener("click", () => {
  keys.set("admin", "");
  keys.set("api", "");
  useKeys();
});

// Dialogs and shortcuts

byId("open-help").addEventListener("click", () => byId("help").showModal());
for (const button of document.querySelectorAll("[data-close]")) {
  button.addEventListener("click", () => button.closest("dialog").close());
}

const singleKeys = byId("single-keys");
singleKeys.checked = localStorage.getItem("loraplex.single-keys") !== "off";
singleKeys.addEventListener("change", () => {
  localStorage.setItem("loraplex.single-keys", singleKeys.checked ? "on" : "off");
});

const FILTERS = { fleet: "adapter-filter", playground: "model-filter" };
const SHORTCUTS = {
  1: () => go("fleet"),
  2: () => go("playground"),
  3: () => go("batches"),
  "/": () => byId(FILTERS[current] ?? "main").focus(),
  k: () => openKeys(current === "fleet" ? "admin" : "api"),
  t: nextTheme,
  "?": () => byId("help").showModal(),
};

addEventListener("keydown", (event) => {
  if (event.defaultPrevented || document.querySelector("dialog[open]")) return;
  if (event.key === "Escape") return escape();
  if (event.ctrlKey || event.metaKey || event.altKey || !singleKeys.checked) return;
  if (event.target.closest("input, textarea, select")) return;
  const shortcut = SHORTCUTS[event.key];
  if (!shortcut) return;
  event.preventDefault();
  shortcut();
});

function escape() {
  if (playground.running) playground.stop();
  else if (fleetView.picked ?? fleetView.pickedName) fleetView.pick(fleetView.picked, fleetView.pickedName);
}

const wanted = location.hash.slice(1).split("?")[0];
repaint();
go(VIEWS.includes(wanted) ? wanted : "fleet");
feed.run();
