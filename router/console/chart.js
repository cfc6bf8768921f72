// A small line over the last minute and a half, on a canvas.

import { fit, ink } from "./canvas.js";

const POINTS = 90;

/** values: oldest first. top: the least that the full height stands for. */
export function sparkline(canvas, values, top) {
  const { context, width, height } = fit(canvas);
  context.clearRect(0, 0, width, height);
  if (!values.length) return;
  const highest = Math.max(top, ...values);
  const step = width / (POINTS - 1);
  const left = width - (values.length - 1) * step;
  const y = (value) => height - 1.5 - (value / highest) * (height - 4);
  const line = new Path2D();
  values.forEach((value, i) => (i ? line.lineTo(left + i * step, y(value)) : line.moveTo(left, y(value))));
  const area = new Path2D(line);
  area.lineTo(width, height);
  area.lineTo(left, height);
  context.fillStyle = ink("--chart-fill");
  context.fill(area);
  context.strokeStyle = ink("--chart");
  context.lineWidth = 1.5;
  context.lineJoin = "round";
  context.stroke(line);
}
