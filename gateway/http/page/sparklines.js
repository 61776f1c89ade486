// Draws lines for the last minute: one point for each second, and a gap for seconds without data.

import { makeSvg, setAttributes } from "./dom.js";
import { niceCeiling } from "./numbers.js";

const WIDTH = 240;
const HEIGHT = 48;
const TOP = 2; // room for half a line's width

export class Sparkline {
  // `names`: the classes of the lines; the last line is drawn on top. `isArea`: fills the area below the first line.
  constructor(svg, names, isArea = false) {
    setAttributes(svg, { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none" });
    this.area = isArea ? makeSvg("path", { class: "area" }) : null;
    this.lines = names.map((name) => makeSvg("path", { class: `line ${name}` }));
    svg.append(...(this.area ? [this.area] : []), ...this.lines);
  }

  // Returns the value at the top of the scale; null if there is nothing to draw.
  draw(series) {
    const highest = Math.max(0, ...series.flat().filter((value) => value !== null));
    const ceiling = niceCeiling(highest);
    const at = (value, index, values) => [
      (index / (values.length - 1)) * WIDTH,
      HEIGHT - (value / ceiling) * (HEIGHT - TOP),
    ];
    series.forEach((values, number) => setAttributes(this.lines[number], { d: linePath(values, at) }));
    if (this.area) setAttributes(this.area, { d: areaPath(series[0], at) });
    return highest > 0 ? ceiling : null;
  }
}

function linePath(values, at) {
  let path = "";
  let isDown = false;
  values.forEach((value, index) => {
    if (value === null) {
      isDown = false;
      return;
    }
    const [x, y] = at(value, index, values);
    // A single second between gaps would be too small to see, so it gets a longer line.
    const isAlone = !isDown && (values[index + 1] ?? null) === null;
    path += isDown ? `L${x.toFixed(1)} ${y.toFixed(1)}` : `M${(x - (isAlone ? 3 : 0)).toFixed(1)} ${y.toFixed(1)}${isAlone ? "h3" : ""}`;
    isDown = true;
  });
  return path;
}

function areaPath(values, at) {
  const points = values.map((value, index) => at(value ?? 0, index, values).map((n) => n.toFixed(1)).join(" "));
  return `M0 ${HEIGHT}L${points.join("L")}L${WIDTH} ${HEIGHT}Z`;
}
