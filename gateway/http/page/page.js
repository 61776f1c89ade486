// The page: follows the cluster, and passes each snapshot to the modules that draw its parts.

import { Cluster } from "./cluster.js";
import { byId, make, setText } from "./dom.js";
import { Links } from "./links.js";
import { count, duration, rate, round } from "./numbers.js";
import { Sparkline } from "./sparklines.js";
import { Follower, key, Refused } from "./stream.js";
import { Trial } from "./trial.js";

const LATELY_S = 5;
const PATHS = ["disaggregated", "local", "fallback"];
const THEMES = ["auto", "light", "dark"];

const cluster = new Cluster();
const links = new Links(cluster);
const lines = {
  tokens: new Sparkline(byId("tokens-line"), ["only"], true),
  ttft: new Sparkline(byId("ttft-line"), ["p99", "p50"]),
  itl: new Sparkline(byId("itl-line"), ["p99", "p50"]),
};
const paths = Object.fromEntries(PATHS.map((name) => [name, pathRow(name)]));

function draw(snapshot) {
  setText(byId("model"), snapshot.model);
  setText(byId("version"), `Baton ${snapshot.version}`);
  drawFigures(snapshot.last_minute);
  drawGateway(snapshot.gateway);
  const hasMoved = cluster.draw(snapshot.workers);
  links.draw(snapshot, hasMoved);
}

function drawFigures(minute) {
  const lately = (values) => values.slice(-LATELY_S).reduce((sum, value) => sum + value, 0) / LATELY_S;
  setText(byId("tokens-per-s"), rate(lately(minute.tokens)));
  setText(byId("requests-per-s"), `${rate(lately(minute.finished))} requests/s`);
  scale("tokens", lines.tokens.draw([minute.tokens]), (value) => `0 to ${count(value)}`);
  for (const name of ["ttft", "itl"]) {
    const [p50, p99] = minute[`${name}_s`];
    const hasAny = p99 > 0;
    setText(byId(`${name}-p50`), hasAny ? duration(p50) : "–");
    setText(byId(`${name}-p99`), hasAny ? duration(p99) : "–");
    const top = lines[name].draw([minute[`${name}_p99_s`], minute[`${name}_p50_s`]]);
    scale(name, top, (value) => `0 to ${round(value)}`);
    const words = hasAny ? `median ${duration(p50)}, 99th percentile ${duration(p99)}` : "nothing in the last minute";
    byId(`${name}-line`).setAttribute("aria-label", words);
  }
}

function scale(name, top, text) {
  setText(byId(`${name}-scale`), top === null ? "" : text(top));
}

function drawGateway(gateway) {
  setText(byId("in-flight"), count(gateway.in_flight));
  setText(byId("queued"), count(gateway.queued));
  setText(byId("failed"), count(gateway.outcomes.failed));
  setText(byId("refused"), count(gateway.outcomes.rejected));
  setText(byId("oldest"), gateway.queued ? `the oldest waits for ${duration(gateway.oldest_queued_s)}` : "none waits");
  const total = PATHS.reduce((sum, name) => sum + (gateway.paths[name] ?? 0), 0);
  for (const name of PATHS) {
    const number = gateway.paths[name] ?? 0;
    setText(paths[name].number, count(number));
    paths[name].bar.style.width = `${total ? (100 * number) / total : 0}%`;
  }
}

function pathRow(name) {
  const bar = make("i", name);
  const number = make("span", "", "–");
  byId("paths").append(make("div", "", make("dt", "", name), make("dd", "", make("span", "track", bar), number)));
  return { bar, number };
}

// The connection to the gateway, and the API key if the gateway requires one.

const follower = new Follower("cluster/events", draw, report);
new Trial({ refused: askForKey, runsOn: (names) => cluster.mark(names) });

function report(state, error) {
  const hasAnswer = error instanceof Refused;
  const away = `✕ ${hasAnswer ? "cannot watch" : "no connection"}, trying again`;
  const words = { live: "● live", away, refused: "✕ not allowed to watch" };
  setText(byId("connection"), words[state]);
  byId("connection").dataset.state = state;
  setText(byId("refusal"), hasAnswer ? error.message : "");
  document.body.classList.toggle("stale", state !== "live");
  if (error?.status === 401) askForKey(error);
}

function askForKey(error) {
  const dialog = byId("key-dialog");
  if (dialog.open) return;
  setText(byId("key-reason"), `${error ? `${error.message}. ` : ""}A key stays in this tab, and is forgotten with it.`);
  byId("key-input").value = key.get();
  dialog.returnValue = "";
  dialog.showModal();
}

byId("key").addEventListener("click", () => askForKey());
byId("key-cancel").addEventListener("click", () => byId("key-dialog").close());
byId("key-dialog").addEventListener("close", () => {
  const dialog = byId("key-dialog");
  if (dialog.returnValue !== "save") return;
  const typed = byId("key-input").value.trim();
  const foreign = typed.match(/[^ -~]/u);
  if (foreign) {
    askForKey(new Error(`Keys are plain ASCII, but this one contains the character ${foreign[0]}; copy the key again`));
    return;
  }
  key.set(typed);
  follower.start();
});

// The theme: the system's theme, unless the user chooses another one.

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  setText(byId("theme"), `Theme: ${theme}`);
}

byId("theme").addEventListener("click", () => {
  const next = THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length];
  localStorage.setItem("baton-theme", next);
  setTheme(next);
});

const stored = localStorage.getItem("baton-theme");
setTheme(THEMES.includes(stored) ? stored : "auto");
follower.start();
