// Reads server-sent events with fetch: unlike EventSource, fetch can send an API key.

const SILENCE_MS = 5000;
const RETRY_MS = [1000, 2000, 4000, 8000];
const STORED_KEY = "baton-api-key";

export const key = {
  get: () => sessionStorage.getItem(STORED_KEY) ?? "",
  set: (value) => (value ? sessionStorage.setItem(STORED_KEY, value) : sessionStorage.removeItem(STORED_KEY)),
};

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// Whether a retry with the same key would fail again.
const isFinal = (error) => error instanceof Refused && [401, 403].includes(error.status);

// Yields [name, data] of each event. Throws Refused if the answer is an error.
export async function* events(path, options = {}) {
  const headers = { ...options.headers };
  if (key.get()) headers.Authorization = `Bearer ${key.get()}`;
  const response = await fetch(path, { ...options, headers });
  if (!response.ok) {
    const body = await response.json().catch(() => null);
    throw new Refused(response.status, body?.error?.message ?? `the gateway answered ${response.status}`);
  }
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    const parts = text.split("\n\n");
    text = parts.pop();
    yield* parts.filter(Boolean).map(parse);
  }
}

function parse(part) {
  const fields = Object.fromEntries(part.split("\n").map((line) => [line.slice(0, line.indexOf(": ")), line.slice(line.indexOf(": ") + 2)]));
  return [fields.event, JSON.parse(fields.data)];
}

// Follows the cluster's snapshots while the page is visible. `report` receives the state "live", "away" or "refused".
export class Follower {
  constructor(path, take, report) {
    this.path = path;
    this.take = take;
    this.report = report;
    this.controller = null;
    this.retry = null;
    this.numFailures = 0;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.stop() : this.start()));
  }

  start() {
    this.stop();
    if (document.hidden) return; // it starts when the page becomes visible
    const controller = new AbortController();
    this.controller = controller;
    this.#follow(controller.signal).catch((error) => {
      if (this.controller !== controller) return; // it was stopped
      this.report(isFinal(error) ? "refused" : "away", error);
    });
  }

  stop() {
    clearTimeout(this.retry);
    this.controller?.abort();
    this.controller = null;
  }

  async #follow(signal) {
    let silence = this.#watchdog();
    try {
      for await (const [name, data] of events(this.path, { signal })) {
        clearTimeout(silence);
        if (name === "snapshot") {
          this.numFailures = 0;
          this.report("live");
          this.take(data);
        }
        silence = this.#watchdog();
      }
      throw new Error("the gateway ended the stream");
    } catch (error) {
      if (!signal.aborted && !isFinal(error)) this.#again();
      throw error;
    } finally {
      clearTimeout(silence);
    }
  }

  #watchdog() {
    return setTimeout(() => {
      this.report("away", new Error("no data for a while"));
      this.start();
    }, SILENCE_MS);
  }

  #again() {
    const delay = RETRY_MS[Math.min(this.numFailures, RETRY_MS.length - 1)];
    this.numFailures += 1;
    this.retry = setTimeout(() => this.start(), delay);
  }
}
