// Writes numbers for people, with as few digits as necessary.

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds >= 10) return `${seconds.toFixed(0)}\u00a0s`;
  if (seconds >= 1) return `${seconds.toFixed(2)}\u00a0s`;
  const ms = seconds * 1000;
  return `${ms.toFixed(ms >= 10 ? 0 : 1)}\u00a0ms`;
}

// Writes a duration that is a round number.
export function round(seconds) {
  return seconds >= 1 ? `${seconds}\u00a0s` : `${Number((seconds * 1000).toPrecision(3))}\u00a0ms`;
}

export function count(value) {
  if (value < 10000) return String(value);
  if (value < 1e6) return `${(value / 1e3).toFixed(value < 1e5 ? 1 : 0)} k`;
  return `${(value / 1e6).toFixed(1)} M`;
}

export function rate(value) {
  return value >= 10 || value === 0 ? count(Math.round(value)) : value.toFixed(1);
}

export function size(bytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let value = bytes;
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${value >= 10 || unit === 0 ? value.toFixed(0) : value.toFixed(1)}\u00a0${units[unit]}`;
}

export const plural = (number, word) => `${count(number)} ${word}${number === 1 ? "" : "s"}`;

// The smallest of 1, 2, 5, 10, 20 ... that is not less than the value. A scale that ends there seldom changes.
export function niceCeiling(value) {
  if (!(value > 0)) return 1;
  const magnitude = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 5, 10].find((factor) => value <= factor * magnitude * 1.0000001);
  return step * magnitude;
}
