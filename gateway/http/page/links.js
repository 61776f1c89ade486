// Shows hand-overs: links between workers, and dots that move along the links. Workers count the hand-overs. At most
// MAX_DOTS dots move; if there are more hand-overs, a dot stands for several of them. Links move only when cards move.

import { byId, make, makeSvg, setAttributes, setText } from "./dom.js";
import { plural, rate, size } from "./numbers.js";

const MAX_DOTS = 40;
const MAX_DOTS_A_PAIR = 3;
const MAX_IDLE_LINKS = 64;
const MAX_LINKS = 96;
const CROSSING_MS = 1100;
const MAX_PAIRS = 256; // a gateway reports at most this many pairs
const MAX_KNOWN_PAIRS = 4 * MAX_PAIRS; // workers leave, and new ones have new names
const NOTHING = { done: 0, failed: 0, bytes: 0 };
const WINDOW_S = 60;
const RATE_S = 5;
const CURVE_STEPS = 12;

const calm = matchMedia("(prefers-reduced-motion: reduce)");

export class Links {
  constructor(cluster) {
    this.cluster = cluster;
    this.layer = byId("links");
    this.svg = makeSvg("svg");
    this.layer.append(this.svg);
    this.pairs = new Map(); // "w0 w2" -> { prefill, decode, done, failed, bytes: of the last snapshot, seconds: [...] }
    this.drawn = new Map();
    this.dots = new Set();
    this.second = null; // of the last snapshot
    new ResizeObserver(() => this.place()).observe(this.layer);
  }

  draw(snapshot, hasMoved) {
    const crossing = this.#count(snapshot.handovers, snapshot.last_minute.newest);
    this.#choose(snapshot.workers);
    if (hasMoved) this.place();
    this.#weigh();
    this.#cross(crossing);
    this.#say();
  }

  // Returns each pair's new hand-overs since the last snapshot. The counts of a pair that is new, or whose counts fell,
  // began at zero. Without an earlier snapshot, or if snapshots do not report all pairs, counts cannot be compared.
  #count(handovers, second) {
    const crossing = [];
    const isComparable = this.second !== null && handovers.length < MAX_PAIRS;
    for (const { prefill, decode, done, failed, num_bytes: bytes } of handovers) {
      const id = `${prefill} ${decode}`;
      const pair = this.pairs.get(id) ?? { id, prefill, decode, seconds: [], ...(isComparable ? NOTHING : { done, failed, bytes }) };
      const before = done < pair.done || failed < pair.failed ? NOTHING : pair;
      const more = { second, done: done - before.done, failed: failed - before.failed, bytes: bytes - before.bytes };
      if (more.done || more.failed) pair.seconds.push(more);
      if (more.done) crossing.push([pair, more.done]);
      this.pairs.delete(id); // so that the oldest pair comes first
      this.pairs.set(id, Object.assign(pair, { done, failed, bytes }));
    }
    for (const id of [...this.pairs.keys()].slice(0, -MAX_KNOWN_PAIRS)) this.pairs.delete(id);
    for (const pair of this.pairs.values()) {
      pair.seconds = pair.seconds.filter((part) => part.second > second - WINDOW_S);
    }
    this.second = second;
    return crossing;
  }

  // Chooses the links: links of pairs with recent hand-overs and, in small clusters, faint links of other pairs.
  #choose(workers) {
    const prefill = workers.filter((worker) => worker.role === "prefill");
    const decode = workers.filter((worker) => worker.role === "decode");
    const wanted = new Map();
    const busy = [...this.pairs.values()].filter((pair) => pair.seconds.length);
    busy.sort((a, b) => lately(b).done - lately(a).done);
    for (const pair of busy.slice(0, MAX_LINKS)) wanted.set(pair.id, pair);
    if (prefill.length * decode.length <= MAX_IDLE_LINKS) {
      for (const p of prefill) {
        for (const d of decode) {
          const id = `${p.name} ${d.name}`;
          if (!wanted.has(id)) wanted.set(id, { id, prefill: p.name, decode: d.name, seconds: [] });
        }
      }
    }
    for (const [id, link] of this.drawn) {
      if (wanted.has(id)) continue;
      link.path.remove();
      this.drawn.delete(id);
    }
    for (const [id, pair] of wanted) {
      const link = this.drawn.get(id);
      if (link) {
        link.pair = pair;
      } else {
        const path = makeSvg("path", { class: "link" });
        this.svg.append(path);
        this.drawn.set(id, { pair, path });
        this.#placeLink(this.drawn.get(id));
      }
    }
  }

  // Places the links anew. Removes the moving dots, since they would follow the links' old places.
  place() {
    for (const dot of this.dots) dot.remove();
    this.dots.clear();
    for (const link of this.drawn.values()) this.#placeLink(link);
  }

  #placeLink(link) {
    const from = this.cluster.element(link.pair.prefill);
    const to = this.cluster.element(link.pair.decode);
    link.curve = from && to && from.dataset.role !== to.dataset.role ? this.#curve(from, to) : null;
    const { curve } = link;
    const d = curve ? `M${curve[0]} ${curve[1]}C${curve[2]} ${curve[3]} ${curve[4]} ${curve[5]} ${curve[6]} ${curve[7]}` : "";
    setAttributes(link.path, { d });
  }

  #curve(from, to) {
    const origin = this.layer.getBoundingClientRect();
    const [a, b] = [from.getBoundingClientRect(), to.getBoundingClientRect()];
    const isLeftToRight = a.left < b.left;
    const x1 = (isLeftToRight ? a.right : a.left) - origin.left;
    const x2 = (isLeftToRight ? b.left : b.right) - origin.left;
    const y1 = a.top + a.height / 2 - origin.top;
    const y2 = b.top + b.height / 2 - origin.top;
    const bend = (x2 - x1) / 2;
    return [x1, y1, x1 + bend, y1, x2 - bend, y2, x2, y2].map((n) => Math.round(n * 10) / 10);
  }

  #weigh() {
    for (const { pair, path } of this.drawn.values()) {
      const { done } = lately(pair);
      const width = done ? Math.min(4, 1 + Math.log2(1 + done) / 3) : 1;
      setAttributes(path, { class: done ? "link busy" : "link", "stroke-width": width.toFixed(1) });
    }
  }

  #cross(crossing) {
    if (document.hidden) return;
    crossing.sort((a, b) => b[1] - a[1]);
    let room = MAX_DOTS - this.dots.size;
    for (const [pair, done] of crossing) {
      const curve = this.drawn.get(pair.id)?.curve;
      if (!curve) continue;
      if (calm.matches) {
        flash(this.drawn.get(pair.id).path);
        continue;
      }
      const number = Math.min(done, MAX_DOTS_A_PAIR, room);
      for (let index = 0; index < number; index += 1) {
        this.#send(curve, done / number, (index + Math.random()) * (1000 / number));
      }
      room -= Math.max(0, number);
    }
  }

  #send(curve, numStoodFor, delay) {
    const dot = make("i", "dot");
    const diameter = Math.min(16, 7 + 2 * Math.log2(numStoodFor));
    dot.style.width = dot.style.height = `${diameter}px`;
    this.layer.append(dot);
    this.dots.add(dot);
    // Only transforms move the dot, so its movement costs no layout and runs no script.
    const moving = dot.animate(
      Array.from({ length: CURVE_STEPS + 1 }, (_, step) => {
        const [x, y] = along(curve, step / CURVE_STEPS);
        const opacity = step === 0 || step === CURVE_STEPS ? 0 : 1; // unseen until it leaves
        return { transform: `translate(${x - diameter / 2}px, ${y - diameter / 2}px)`, opacity };
      }),
      { duration: CROSSING_MS, delay, fill: "backwards", easing: "ease-in-out" },
    );
    moving.onfinish = () => {
      dot.remove();
      this.dots.delete(dot);
    };
  }

  #say() {
    const recent = [...this.pairs.values()].flatMap((pair) => pair.seconds);
    const latest = recent.filter((part) => part.second > this.second - RATE_S);
    const failed = sum(recent, "failed");
    const lastly = `${rate(sum(latest, "done") / RATE_S)} hand-overs/s, ${size(sum(latest, "bytes") / RATE_S)}/s of KV`;
    setText(byId("handover-rate"), failed ? `${lastly}; ${failed} failed in the last minute` : lastly);
    if (byId("pairs").closest("details").open) this.#table();
  }

  #table() {
    const rows = [...this.pairs.values()].filter((pair) => pair.seconds.length).map((pair) => {
      const { done, failed, bytes } = lately(pair);
      const cells = [pair.prefill, pair.decode, plural(done, "hand-over"), String(failed), size(bytes)];
      return make("tr", "", ...cells.map((text) => make("td", "", text)));
    });
    byId("pairs").replaceChildren(...rows);
  }
}

function lately(pair) {
  return { done: sum(pair.seconds, "done"), failed: sum(pair.seconds, "failed"), bytes: sum(pair.seconds, "bytes") };
}

function sum(parts, field) {
  return parts.reduce((total, part) => total + part[field], 0);
}

// A point of a cubic Bezier curve.
function along([x0, y0, x1, y1, x2, y2, x3, y3], t) {
  const s = 1 - t;
  const [a, b, c, d] = [s * s * s, 3 * s * s * t, 3 * s * t * t, t * t * t];
  return [a * x0 + b * x1 + c * x2 + d * x3, a * y0 + b * y1 + c * y2 + d * y3];
}

function flash(path) {
  path.classList.add("crossed");
  setTimeout(() => path.classList.remove("crossed"), 900);
}
