// One arena as a picture: what lies where, to scale; hovered, walked through, highlighted.

import { fit, ink, theme } from "./canvas.js";
import { announce, byId, bytes, h, plural, seconds, setAttribute } from "./dom.js";
import { layout, segments } from "./segments.js";

const GAP = 3;

export class Arena {
  /** tier: device or host. onPick: hears of a digest, or null. */
  constructor(tier, names, onPick) {
    this.tier = tier;
    this.names = names;
    this.worker = null;
    this.boxes = [];
    this.cursor = null;
    this.canvas = h("canvas", {
      class: `arena ${tier}`,
      role: "img",
      tabindex: "0",
      onmousemove: (event) => this.hover(event),
      onmouseleave: () => this.leave(),
      onblur: () => this.leave(),
      onclick: (event) => onPick(this.at(event)?.segment.place?.digest ?? null),
      onkeydown: (event) => this.key(event, onPick),
    });
  }

  /** style: {rowHeight, maxRows}. picked: the digest to bring out, or null. */
  show(worker, style, picked) {
    if (this.places !== worker.places || this.extents !== worker[`${this.tier}_extents`]) {
      this.places = worker.places;
      this.extents = worker[`${this.tier}_extents`];
      this.all = segments(this.places, this.tier, this.extents);
      this.shared = sharedEnds(this.places.map((place) => this.names.of(place.digest)));
    }
    Object.assign(this, { worker, style, picked });
    this.describe();
    this.drawChanged();
  }

  /** Once a second nothing may have changed that shows. */
  drawChanged() {
    const inUse = this.tier === "device" ? Object.keys(this.worker.in_use).join() : "";
    const now = [this.places, this.picked, this.style, this.canvas.clientWidth, theme(), inUse];
    if (this.drawn?.every((value, i) => value === now[i])) return;
    this.draw();
    this.drawn = now;
  }

  get used() {
    return this.all.reduce((sum, s) => sum + (s.place ? s.count : 0), 0) * this.worker.extent_bytes;
  }

  get total() {
    return this.extents * this.worker.extent_bytes;
  }

  get count() {
    return new Set(this.all.filter((s) => s.place).map((s) => s.place)).size;
  }

  describe() {
    const where = this.tier === "device" ? "Device memory" : "Host memory";
    const what = `${where} of ${this.worker.id ?? this.worker.url}: ${plural(this.count, "adapter")}, `;
    const keys = this.count ? " Arrow keys walk through it." : "";
    setAttribute(this.canvas, "aria-label", `${what}${bytes(this.used)} of ${bytes(this.total)}.${keys}`);
  }

  draw() {
    const { rowHeight, maxRows } = this.style;
    const wide = this.canvas.clientWidth;
    const { rows, folded, boxes } = layout(this.all, this.extents, wide, maxRows);
    const overview = folded && rowHeight > 14 ? 7 : 0;
    this.boxes = boxes;
    const high = `${rows * (rowHeight + GAP) - GAP + overview}px`;
    if (this.canvas.style.height !== high) this.canvas.style.height = high;
    const { context, width, height } = fit(this.canvas);
    context.clearRect(0, 0, width, height);
    for (const box of boxes) this.box(context, box, rowHeight);
    if (overview) this.overview(context, width, height - 3);
  }

  box(context, box, rowHeight) {
    const { place } = box.segment;
    const y = box.row * (rowHeight + GAP);
    const gap = box.width > 4 && !box.open[1] ? 1.5 : 0;
    const shape = outline(box, y, box.width - gap, rowHeight);
    if (!place) {
      context.fillStyle = ink("--arena-free");
      paint(context, shape);
      return;
    }
    const loading = place[this.tier] === "loading";
    const inUse = !loading && this.tier === "device" && this.worker.in_use[place.digest] > 0;
    context.globalAlpha = this.picked !== null && this.picked !== place.digest ? 0.25 : 1;
    const [light, chroma] = inUse ? ["--cell-used-l", "--cell-used-c"] : ["--cell-l", "--cell-c"];
    context.fillStyle = `oklch(${ink(light)} ${ink(chroma)} ${this.names.hue(place.digest)})`;
    paint(context, shape);
    if (loading && shape instanceof Path2D) this.stripes(context, shape, box, y, rowHeight);
    if (place.pinned && this.tier === "device") this.pin(context, box, y, gap);
    if (this.cursor === place.digest || this.picked === place.digest) {
      context.fillStyle = context.strokeStyle = ink("--text");
      context.lineWidth = 1.5;
      if (shape instanceof Path2D) context.stroke(shape);
      else paint(context, shape);
    }
    this.label(context, box, y, rowHeight, inUse, place.pinned);
    context.globalAlpha = 1;
  }

  stripes(context, shape, box, y, rowHeight) {
    context.save();
    context.clip(shape);
    context.strokeStyle = ink("--stripe");
    context.lineWidth = 3;
    context.beginPath();
    for (let x = box.x - rowHeight; x < box.x + box.width; x += 8) {
      context.moveTo(x, y + rowHeight);
      context.lineTo(x + rowHeight, y);
    }
    context.stroke();
    context.restore();
  }

  /** A corner, as of a page that is kept. */
  pin(context, box, y, gap) {
    if (box.open[1] || box.width < 3) return;
    const size = Math.min(9, box.width - gap);
    const right = box.x + box.width - gap;
    context.fillStyle = ink("--text");
    context.beginPath();
    context.moveTo(right - size, y);
    context.lineTo(right, y);
    context.lineTo(right, y + size);
    context.fill();
  }

  label(context, box, y, rowHeight, inUse, pinned) {
    if (rowHeight < 14 || box.width < 28 || box.open[0]) return;
    context.font = `${rowHeight > 20 ? 12 : 11}px ${ink("--font")}`;
    const room = box.width - (pinned ? 20 : 12);
    const name = this.names.of(box.segment.place.digest);
    const text = clip(context, name, room, this.shared.get(name));
    if (!text) return;
    context.fillStyle = inUse ? ink("--cell-used-text") : ink("--cell-text");
    context.textBaseline = "middle";
    context.fillText(text, box.x + 6, y + rowHeight / 2 + 0.5);
  }

  /** The whole arena without folds, thin. */
  overview(context, width, y) {
    const scale = width / this.extents;
    context.fillStyle = ink("--arena-free");
    context.fillRect(0, y, width, 3);
    context.fillStyle = ink("--muted");
    for (const { first, count, place } of this.all) {
      if (place) context.fillRect(first * scale, y, Math.max(count * scale, 1), 3);
    }
  }

  // Looking closer

  at(event) {
    const { left, top } = this.canvas.getBoundingClientRect();
    const [x, y] = [event.clientX - left, event.clientY - top];
    const row = Math.floor(y / (this.style.rowHeight + GAP));
    return this.boxes.find((b) => b.row === row && x >= b.x && x < b.x + b.width);
  }

  hover(event) {
    const box = this.at(event);
    if (!box) return this.leave();
    this.point(box.segment.place?.digest ?? null);
    tip(this.tell(box.segment), event.clientX, event.clientY + 18);
  }

  leave() {
    this.point(null);
    byId("tip").hidden = true;
  }

  point(digest) {
    if (this.cursor === digest) return;
    this.cursor = digest;
    this.draw();
  }

  key(event, onPick) {
    const held = this.all.filter((s) => s.place).map((s) => s.place);
    const places = [...new Set(held)];
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && places.length) {
      const now = places.findIndex((place) => place.digest === this.cursor);
      const next = now < 0 ? (step > 0 ? 0 : places.length - 1) : (now + step + places.length) % places.length;
      this.point(places[next].digest);
      const box = this.boxes.find((b) => b.segment.place === places[next]);
      const told = this.tell(box.segment);
      const { left, top } = this.canvas.getBoundingClientRect();
      tip(told, left + box.x, top + (box.row + 1) * (this.style.rowHeight + GAP) + 4);
      announce(told.join(", "));
    } else if (event.key === "Enter" && this.cursor) {
      onPick(this.cursor);
    } else if (event.key === "Escape" && this.cursor) {
      this.leave();
    } else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Lines about a segment. */
  tell({ count, place }) {
    const size = this.worker.extent_bytes;
    if (!place) return ["Free", bytes(count * size)];
    const spans = this.tier === "device" ? place.device_spans : place.host_spans;
    const held = spans.reduce((sum, [, n]) => sum + n, 0) * size;
    const running = this.worker.in_use[place.digest] ?? 0;
    const pieces = spans.length > 1 ? ` in ${spans.length} pieces` : "";
    const lines = [this.names.of(place.digest), `${bytes(held)}${pieces}`];
    if (place[this.tier] === "loading") lines.push("loading");
    else if (running) lines.push(plural(running, "sequence"));
    else lines.push("idle");
    if (place.pinned) lines.push("pinned");
    if (place.load_s !== null) lines.push(`loaded in ${seconds(place.load_s)}`);
    return lines;
  }
}

/** A rounded box, or the four numbers of one too narrow for corners: of those there are thousands. */
function outline({ x, width, open }, y, wide, high) {
  if (width < 5) return [x, y, Math.max(wide, 0.6), high];
  const radius = Math.min(4, high / 4, width / 3);
  const [left, right] = open.map((wraps) => (wraps ? 0 : radius));
  const shape = new Path2D();
  shape.roundRect(x, y, wide, high, [left, right, right, left]);
  return shape;
}

function paint(context, shape) {
  if (shape instanceof Path2D) context.fill(shape);
  else context.fillRect(...shape);
}

/** By name: how long a beginning of whole words it has in common with another name, and how long an end. */
function sharedEnds(names) {
  const heads = new Map();
  const tails = new Map();
  const ends = [...new Set(names)].map((name) => [name, [...name.matchAll(/[-_.:/]/g)].map(({ index }) => index)]);
  const count = (map, text) => map.set(text, (map.get(text) ?? 0) + 1);
  for (const [name, cuts] of ends) {
    for (const cut of cuts) {
      count(heads, name.slice(0, cut + 1));
      count(tails, name.slice(cut));
    }
  }
  const shares = ([name, cuts]) => {
    const head = Math.max(0, ...cuts.map((cut) => cut + 1).filter((cut) => cut < name.length && heads.get(name.slice(0, cut)) > 1));
    const tail = Math.max(0, ...cuts.filter((cut) => cut > head && tails.get(name.slice(cut)) > 1).map((cut) => name.length - cut));
    return [name, [head, tail]];
  };
  return new Map(ends.map(shares));
}

/** The ends that other names have, too, go first; what differs is cut in its middle. */
function clip(context, text, room, [head, tail] = [0, 0]) {
  const fits = (shown) => context.measureText(shown).width <= room;
  const bare = text.slice(head, text.length - tail);
  const whole = [text, `${head ? "…" : ""}${bare}${tail ? "…" : ""}`, bare].find(fits);
  if (whole !== undefined) return whole;
  const count = Math.floor((bare.length * room) / context.measureText(bare).width) - 1;
  const before = Math.ceil(count / 2);
  return count < 3 ? "" : `${bare.slice(0, before)}…${bare.slice(before - count)}`;
}

function tip(lines, x, y) {
  const node = byId("tip");
  node.replaceChildren(h("strong", {}, lines[0]), ...lines.slice(1).map((line) => h("span", {}, line)));
  node.hidden = false;
  const right = document.documentElement.clientWidth - node.offsetWidth - 8;
  const bottom = document.documentElement.clientHeight - node.offsetHeight - 8;
  node.style.left = `${Math.max(8, Math.min(x, right))}px`;
  node.style.top = `${Math.max(8, Math.min(y, bottom))}px`;
}
