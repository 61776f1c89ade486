// Shows one request in four stages. While the request runs, each stage has a state. At the end, bars on a common time
// axis show when each stage began and ended.

import { make, setText } from "./dom.js";
import { duration } from "./numbers.js";

const NAMES = { queue: "Queue", prefill: "Prefill", transfer: "Transfer", decode: "Decode" };
const MARKS = { waiting: "○", active: "◐", done: "●", skipped: "–", failed: "✕" };

export class Stages {
  constructor(list) {
    this.list = list;
    this.stages = {};
  }

  reset() {
    this.list.replaceChildren();
    for (const [id, name] of Object.entries(NAMES)) {
      const stage = {
        mark: make("span", "mark"),
        detail: make("span", "detail"),
        time: make("span", "time"),
        track: make("div", "track"),
      };
      stage.element = make(
        "li",
        "stage-row",
        make("p", "", stage.mark, make("b", "", name), stage.detail, stage.time),
        stage.track,
      );
      stage.element.dataset.stage = id;
      this.stages[id] = stage;
      this.list.append(stage.element);
      this.set(id, "waiting", "");
    }
  }

  set(id, state, detail) {
    const stage = this.stages[id];
    stage.element.dataset.state = state;
    setText(stage.mark, MARKS[state]);
    stage.mark.setAttribute("aria-label", state);
    if (detail !== undefined) setText(stage.detail, detail);
  }

  state(id) {
    return this.stages[id].element.dataset.state;
  }

  failActive() {
    for (const id of Object.keys(NAMES)) if (this.state(id) === "active") this.set(id, "failed");
  }

  // `spans`: the spans [from, to, className] of each stage, in seconds. Spans after `until_s` run off the axis.
  drawTimes(spans, until_s) {
    for (const [id, { track, time }] of Object.entries(this.stages)) {
      const parts = spans[id] ?? [];
      track.replaceChildren(
        ...parts.map(([from_s, to_s, className]) => {
          const bar = make("i", to_s > until_s ? `${className} cut` : className);
          const from = Math.min(100, (100 * from_s) / until_s);
          bar.style.left = `${from}%`;
          bar.style.width = `${Math.max(0, Math.min(100, (100 * to_s) / until_s) - from)}%`;
          return bar;
        }),
      );
      const solid = parts.filter(([, , className]) => className !== "thin");
      setText(time, solid.length ? duration(solid.reduce((sum, [from_s, to_s]) => sum + to_s - from_s, 0)) : "");
    }
  }
}
