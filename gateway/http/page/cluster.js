// Shows workers as cards: prefill left, decode right. A card keeps its place until its worker's role changes.

import { byId, make, setText } from "./dom.js";
import { count, plural } from "./numbers.js";

const MARKS = {
  ready: "●", draining: "◐", stopped: "○", dead: "✕", hung: "✕",
  crash_loop: "✕", backing_off: "↻", starting: "◌", placing: "◌",
};
const PARTS = ["used", "leased", "quarantined", "free"];
const FEW = 4;
const MANY = 8;

export class Cluster {
  constructor() {
    this.sides = { prefill: byId("prefill"), decode: byId("decode") };
    this.cards = new Map();
  }

  // Returns whether any card appeared, disappeared or moved.
  draw(workers) {
    let hasMoved = false;
    for (const [name, card] of this.cards) {
      if (!workers.some((worker) => worker.name === name)) {
        card.element.remove();
        this.cards.delete(name);
        hasMoved = true;
      }
    }
    const next = { prefill: this.sides.prefill.firstChild, decode: this.sides.decode.firstChild };
    for (const worker of workers) {
      const card = this.cards.get(worker.name) ?? new Card(worker.name);
      this.cards.set(worker.name, card);
      card.draw(worker);
      if (next[worker.role] === card.element) {
        next[worker.role] = card.element.nextSibling;
      } else {
        this.sides[worker.role].insertBefore(card.element, next[worker.role]);
        hasMoved = true;
      }
    }
    const numMost = Math.max(...Object.values(this.sides).map((side) => side.childElementCount));
    for (const side of Object.values(this.sides)) {
      side.classList.toggle("few", numMost <= FEW);
      side.classList.toggle("many", numMost > MANY);
      side.parentElement.classList.toggle("empty", side.childElementCount === 0);
    }
    return hasMoved;
  }

  // Marks the workers of these names, which run the page's request.
  mark(names) {
    for (const [name, card] of this.cards) card.element.classList.toggle("mine", names.includes(name));
  }

  element(name) {
    return this.cards.get(name)?.element;
  }
}

class Card {
  constructor(name) {
    this.name = make("b", "name", name);
    this.state = make("span", "state");
    this.requests = make("span", "requests");
    this.parts = Object.fromEntries(PARTS.map((part) => [part, make("i", part)]));
    this.bar = make("div", "bar", ...Object.values(this.parts));
    this.bar.setAttribute("role", "img");
    this.blocks = make("p", "blocks");
    this.element = make(
      "li",
      "worker",
      make("p", "line", this.name, this.requests, this.state),
      this.bar,
      this.blocks,
    );
  }

  draw(worker) {
    const { blocks } = worker;
    const mark = MARKS[worker.state] ?? "◌";
    setText(this.state, `${mark} ${worker.state.replace("_", " ")}`);
    this.state.dataset.state = worker.state;
    this.element.dataset.role = worker.role;
    this.element.title = [worker.node && `on ${worker.node}`, worker.failure].filter(Boolean).join("\n");
    setText(this.requests, occupation(worker));
    for (const part of PARTS) {
      const share = blocks.total ? (100 * blocks[part]) / blocks.total : 0;
      this.parts[part].style.width = `${share.toFixed(2)}%`;
      this.parts[part].hidden = share === 0;
    }
    const text = blocks.total ? describe(blocks) : "no blocks yet";
    setText(this.blocks, text);
    this.bar.setAttribute("aria-label", `KV blocks: ${text}`);
  }
}

function occupation({ running, waiting, waiting_for_kv: arriving }) {
  const parts = [[running, "running"], [waiting, "waiting"], [arriving, "await KV"]].filter(([number]) => number);
  return parts.map(([number, what]) => `${count(number)} ${what}`).join(", ") || "idle";
}

function describe(blocks) {
  const parts = [`${count(blocks.used)} used`];
  if (blocks.leased) parts.push(`${count(blocks.leased)} leased`);
  if (blocks.quarantined) parts.push(`${count(blocks.quarantined)} quarantined`);
  return `${parts.join(", ")}, ${count(blocks.free)} free of ${plural(blocks.total, "block")}`;
}
