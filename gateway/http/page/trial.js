// The prompt box: runs one request, and shows its stages as the gateway reports them.

import { byId, setText } from "./dom.js";
import { duration, plural, rate, size } from "./numbers.js";
import { Stages } from "./stages.js";
import { events } from "./stream.js";
import { timeline } from "./timeline.js";

export class Trial {
  // Calls `refused` when an API key is required. Calls `runsOn` with the request's workers, and with none at its end.
  constructor({ refused, runsOn }) {
    this.refused = refused;
    this.runsOn = runsOn;
    this.form = byId("trial-form");
    this.stages = new Stages(byId("stages"));
    this.controller = null;
    this.form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.controller ? this.controller.abort() : this.run();
    });
    byId("prompt").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) this.form.requestSubmit();
    });
  }

  async run() {
    const fields = new FormData(this.form);
    const body = {
      prompt: fields.get("prompt"),
      max_tokens: Number(fields.get("max_tokens")),
      temperature: Number(fields.get("temperature")),
      mode: fields.get("mode") || null,
    };
    this.#begin();
    try {
      const options = {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify(body),
        signal: this.controller.signal,
      };
      for await (const [name, data] of events("cluster/try", options)) this.#take(name, data);
      if (!this.hasEnded) this.#fail("the gateway ended the stream");
    } catch (error) {
      this.#fail(error.name === "AbortError" ? "stopped" : error.message);
      if (error.status === 401) this.refused(error);
    } finally {
      this.controller = null;
      this.runsOn([]);
      setText(byId("run"), "Run");
    }
  }

  #begin() {
    this.controller = new AbortController();
    this.hasEnded = false;
    this.numTokens = 0;
    this.numTokensBefore = 0; // tokens of earlier attempts
    this.placement = null;
    this.numAttempts = 0;
    setText(byId("run"), "Stop");
    this.stages.reset();
    this.stages.set("queue", "active", "at the gateway");
    setText(byId("answer"), "");
    setText(byId("summary"), "");
    setText(byId("sums"), "");
    byId("summary").classList.remove("bad");
    for (const id of ["stages", "answer-title", "answer"]) byId(id).hidden = false;
    byId("summary").hidden = true;
  }

  #take(name, data) {
    if (name === "received") this.stages.set("queue", "active", plural(data.num_prompt_tokens, "prompt token"));
    if (name === "placed") this.#placed(data);
    if (name === "tokens") this.#tokens(data);
    if (name === "end") this.#end(data);
    if (name === "error") this.#fail(data.error.message);
  }

  #placed(placement) {
    this.placement = placement;
    this.numAttempts += 1;
    this.numTokensBefore = this.numTokens;
    const { prefill, decode } = placement;
    this.runsOn([prefill, decode]);
    const again = this.numAttempts > 1 ? `, attempt ${this.numAttempts}` : "";
    this.stages.set("queue", "done");
    this.stages.set("prefill", "active", `on ${prefill ?? decode}${again}`);
    if (prefill) this.stages.set("transfer", "waiting", `${prefill} → ${decode}`);
    else this.stages.set("transfer", "skipped", `not needed: ${localReason(placement)}`);
    this.stages.set("decode", "waiting", `on ${decode}`);
    this.#announce(prefill ? `Prefill on ${prefill}, decode on ${decode}` : `Prefill and decode on ${decode}`);
  }

  #tokens({ text, num_tokens: number }) {
    this.numTokens += number;
    if (this.stages.state("prefill") === "active") {
      this.stages.set("prefill", "done");
      if (this.placement.prefill) this.stages.set("transfer", "active");
    }
    if (this.numTokens > this.numTokensBefore + 1 || !this.placement.prefill) {
      if (this.stages.state("transfer") === "active") this.stages.set("transfer", "done");
      this.stages.set("decode", "active", `on ${this.placement.decode}, ${plural(this.numTokens, "token")}`);
    }
    const answer = byId("answer");
    const isAtEnd = answer.scrollTop + answer.clientHeight >= answer.scrollHeight - 4;
    answer.append(text); // as text, whatever is in it
    if (isAtEnd) answer.scrollTop = answer.scrollHeight;
  }

  #end(end) {
    this.hasEnded = true;
    const { timing, placement } = end;
    const { spans, until_s } = timeline(end);
    this.stages.set("queue", "done");
    const cached = end.num_cached_tokens ? `, ${end.num_cached_tokens} cached` : "";
    const prompt = `${plural(end.num_prompt_tokens, "token")}${cached}`;
    this.stages.set("prefill", "done", `${prompt} on ${placement.prefill ?? placement.decode}`);
    if (spans.transfer.some(([, , className]) => className === "solid")) {
      const how = timing.transport ? ` by ${timing.transport.replaceAll("_", " ")}` : "";
      this.stages.set("transfer", "done", `${size(timing.transfer_bytes)}, ${placement.prefill} → ${placement.decode}${how}`);
    } else if (this.stages.state("transfer") !== "skipped") {
      const reason = placement.prefill ? "no times were reported" : localReason(placement);
      this.stages.set("transfer", placement.prefill && this.numTokens > 1 ? "done" : "skipped", reason);
    }
    this.stages.set("decode", this.numTokens > 1 ? "done" : "skipped", `${plural(end.num_completion_tokens, "token")} on ${placement.decode}`);
    this.stages.drawTimes(spans, until_s);
    this.#summarize(end);
  }

  #summarize({ timing, placement, num_completion_tokens: number, finish_reason: reason, num_attempts: attempts }) {
    const parts = [`First token after ${duration(timing.ttft_s)}`];
    if (placement.prefill && timing.handover_s && !timing.num_tokens_before) parts.push(`the next ${duration(timing.handover_s)} later`);
    if (number > 1 && timing.decode_s > 0) parts.push(`${rate((number - 1) / timing.decode_s)} tokens/s`);
    parts.push(`${duration(timing.total_s)} in all`, `ended by ${reason}`);
    if (attempts > 1) parts.push(`${attempts} attempts`);
    setText(byId("summary"), parts.join(" · "));
    byId("summary").hidden = false;
    setText(byId("sums"), [sum("first token", timing.ttft_s, timing.ttft_parts), sum("hand-over", timing.handover_s, timing.handover_parts)].filter(Boolean).join("\n"));
    this.#announce(`Finished. ${parts.join(", ")}`);
  }

  #fail(message) {
    this.hasEnded = true;
    this.stages.failActive();
    const summary = byId("summary");
    setText(summary, `✕ ${message}`);
    summary.classList.add("bad");
    summary.hidden = false;
    this.#announce(message);
  }

  #announce(text) {
    setText(byId("trial-state"), text);
  }
}

// The parts of a time, without empty parts, as text: "first token 104 ms = gateway 31 ms + ...".
function sum(what, total_s, parts) {
  if (!parts) return "";
  const named = Object.entries(parts).filter(([, seconds]) => seconds >= 0.00005);
  const words = named.map(([name, seconds]) => `${name.replace(/_s$/, "").replaceAll("_", " ")} ${duration(seconds)}`);
  return words.length ? `${what} ${duration(total_s)} = ${words.join(" + ")}` : "";
}

function localReason(placement) {
  return placement.reason || (placement.is_fallback ? "a fallback" : "computed where it is decoded");
}
