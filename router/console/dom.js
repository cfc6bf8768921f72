// Elements and texts. Nothing here knows what is shown.

/** An element. `props`: attributes, `on…` listeners, `class`; null and false are left out. */
export function h(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const byId = (id) => document.getElementById(id);

/** Writes only what differs, so that a live page does not flicker or move a reader's place. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setAttribute(node, name, value) {
  if (value === null) node.removeAttribute(name);
  else if (node.getAttribute(name) !== String(value)) node.setAttribute(name, String(value));
}

/** Tells a screen reader. */
export function announce(text) {
  byId("announcer").textContent = text;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(count) {
  let unit = 0;
  let value = count;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${digits(value)} ${UNITS[unit]}`;
}

const WHOLE = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

export function digits(value) {
  if (value === 0) return "0";
  if (value < 10 && !Number.isInteger(value)) return value.toFixed(1);
  return WHOLE.format(value);
}

export function seconds(value) {
  return value < 1 ? `${digits(value * 1000)} ms` : `${value.toFixed(value < 10 ? 2 : 1)} s`;
}

export const percent = (share) => `${digits(share * 100)} %`;

export const plural = (count, one, many = `${one}s`) => `${digits(count)} ${count === 1 ? one : many}`;

export const clockTime = (unix) =>
  new Date(unix * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", second: "2-digit", hourCycle: "h23" });

/** The time of today's, the day of what is older. */
export function shortTime(unix) {
  const when = new Date(unix * 1000);
  if (when.toDateString() === new Date().toDateString()) return clockTime(unix);
  return when.toLocaleDateString("en", { month: "short", day: "numeric" });
}

export const dateTime = (unix) => new Date(unix * 1000).toLocaleString();

export const shortDigest = (digest) => digest.slice(0, 12);

/** The end of a reference, which tells versions apart. */
export function shortReference(reference) {
  const parts = reference.replace(/^\w+:\/*/, "").split("/").filter(Boolean);
  return parts.length > 2 ? `…/${parts.slice(-2).join("/")}` : parts.join("/");
}
