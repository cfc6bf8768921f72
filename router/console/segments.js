// From a worker's places to what is drawn: pure arithmetic, in extents and pixels.

const FOLD = 16; // pixels that a fold of free space takes
const WHOLE_FROM = 0.15; // share in use from which the arena is drawn without folds
const WIDEST_EXTENT = 14;
const TYPICAL_BLOCK = 84;

/** Rows of extents in order, free ones between: [{first, count, place|null}]. */
export function segments(places, tier, extents) {
  const rows = [];
  for (const place of places) {
    const spans = tier === "device" ? place.device_spans : place.host_spans;
    for (const [first, count] of spans) rows.push({ first, count, place });
  }
  rows.sort((a, b) => a.first - b.first);
  const all = [];
  let at = 0;
  for (const row of rows) {
    if (row.first > at) all.push({ first: at, count: row.first - at, place: null });
    all.push(row);
    at = row.first + row.count;
  }
  if (at < extents) all.push({ first: at, count: extents - at, place: null });
  return all;
}

/**
 * How an arena is drawn in so many rows of `width` pixels: {rows, folded, boxes}.
 * A box is {x, row, width, segment, open: [left, right]}; a segment that wraps has several.
 */
export function layout(all, extents, width, maxRows) {
  const used = all.reduce((sum, segment) => sum + (segment.place ? segment.count : 0), 0);
  if (!extents || width < 1) return { rows: 1, folded: false, boxes: [] };
  const folded = used > 0 && used / extents < WHOLE_FROM;
  const wanted = Math.min(WIDEST_EXTENT, TYPICAL_BLOCK / typicalSize(all));
  const folds = folded ? all.filter((segment) => !segment.place).length : 0;
  const shown = folded ? used : extents;
  const rows = Math.max(1, Math.min(maxRows, Math.ceil((shown * wanted + folds * FOLD) / width)));
  const room = rows * width - folds * FOLD;
  const scale = folded ? Math.min(wanted, Math.max(room, width / 2) / used) : (rows * width) / extents;
  const boxes = [];
  let at = 0;
  for (const segment of all) {
    const long = folded && !segment.place ? FOLD : segment.count * scale;
    place(boxes, segment, at, at + long, width);
    at += long;
  }
  return { rows, folded, boxes };
}

function typicalSize(all) {
  const sizes = new Map();
  for (const { place, count } of all) {
    if (place) sizes.set(place, (sizes.get(place) ?? 0) + count);
  }
  const sorted = [...sizes.values()].sort((a, b) => a - b);
  return sorted[sorted.length >> 1] ?? 1;
}

function place(boxes, segment, from, to, width) {
  let start = from;
  while (to - start > 0.001) {
    const row = Math.floor(start / width + 1e-9);
    const end = Math.min(to, (row + 1) * width);
    const open = [start > from + 0.001, end < to - 0.001];
    boxes.push({ x: start - row * width, row, width: end - start, segment, open });
    start = end;
  }
}
