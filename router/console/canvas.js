// Canvases as sharp as the screen, in the theme's colours.

/** The context of a canvas that fills its box; sizes in CSS pixels. */
export function fit(canvas) {
  const ratio = window.devicePixelRatio || 1;
  const width = canvas.clientWidth;
  const height = canvas.clientHeight;
  const wide = Math.round(width * ratio);
  const high = Math.round(height * ratio);
  if (canvas.width !== wide) canvas.width = wide;
  if (canvas.height !== high) canvas.height = high;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return { context, width, height };
}

let colours = new Map();

/** Changes whenever the colours do. */
export const theme = () => colours;

/** A colour of the style sheet. */
export function ink(name) {
  let colour = colours.get(name);
  if (colour === undefined) {
    colour = getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    colours.set(name, colour);
  }
  return colour;
}

/** After a change of theme. */
export function forgetColours() {
  colours = new Map();
}
