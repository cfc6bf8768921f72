// One model's answer: its text, reasoning and calls, what was measured, and whether its form is right.

import { ApiError } from "./api.js";
import { announce, digits, h, seconds, setText } from "./dom.js";
import { check } from "./schema.js";
import { generate } from "./stream.js";

const FINISHES = { stop: "finished", tool_calls: "called", length: "cut at max tokens", error: "failed" };

export class Column {
  constructor(name) {
    this.name = name;
    this.mark = h("span", { class: "mark" });
    this.stateText = h("span", { class: "state" });
    this.figures = { ttft: h("dd"), rate: h("dd"), tokens: h("dd") };
    this.output = h("div", { class: "output", tabindex: "0", role: "log", "aria-live": "off", "aria-label": `Answer of ${name}` });
    this.verdict = h("p", { class: "verdict", hidden: true });
    this.copy = h("button", { class: "quiet small", type: "button", "aria-label": `Copy the answer of ${name}`, onclick: () => this.copyText() }, "Copy");
    const figure = (title, dd) => h("div", {}, h("dt", {}, title), dd);
    this.node = h(
      "article",
      { class: "column", "aria-label": name },
      h("header", {}, this.mark, h("h3", { title: name }, name), this.stateText),
      this.output,
      this.verdict,
      h("footer", {}, h("dl", { class: "figures" }, figure("first token", this.figures.ttft), figure("tokens/s", this.figures.rate), figure("tokens", this.figures.tokens)), this.copy),
    );
    this.reset("");
  }

  reset(text = "waiting") {
    this.text = "";
    this.calls = [];
    this.reasoning = null;
    this.status = 0;
    this.output.replaceChildren();
    this.verdict.hidden = true;
    this.move(text === "" ? "idle" : "waiting", text);
    for (const dd of Object.values(this.figures)) setText(dd, "–");
  }

  move(state, text) {
    this.state = state;
    this.node.dataset.state = state;
    setText(this.stateText, text);
  }

  async run(call, signal) {
    if (signal.aborted) return this.move("stopped", "stopped");
    this.move("running", "sent");
    try {
      const reason = await generate(this.name, call, signal, (piece) => this.add(piece), (told) => this.tell(told));
      this.move("done", FINISHES[reason] ?? reason);
      this.judge(call.form, reason);
    } catch (error) {
      this.fail(error, signal);
    }
  }

  fail(error, signal) {
    if (signal.aborted) return this.move("stopped", "stopped");
    this.status = error instanceof ApiError ? error.status : 0;
    this.move("failed", this.status ? `error ${this.status}` : "failed");
    this.output.append(h("p", { class: "failure" }, error.message));
  }

  // What comes

  /** piece: {text, reasoning, calls}, as `generate` gives it. */
  add({ text, reasoning, calls }) {
    if (this.state === "running") setText(this.stateText, reasoning ? "reasoning" : "writing");
    const atEnd = this.output.scrollTop + this.output.clientHeight >= this.output.scrollHeight - 4;
    if (reasoning) this.addReasoning(reasoning);
    if (text) {
      this.text += text;
      this.output.append(text);
    }
    for (const delta of calls) this.addCall(delta);
    if (atEnd) this.output.scrollTop = this.output.scrollHeight;
  }

  addReasoning(text) {
    if (!this.reasoning) {
      this.reasoning = h("div", {});
      this.output.append(h("details", { class: "reasoning", open: true }, h("summary", {}, "Reasoning"), this.reasoning));
    }
    this.reasoning.append(text);
  }

  /** The first piece of a call has its name; the pieces of its arguments follow. */
  addCall({ index, function: part }) {
    this.calls[index] ??= this.newCall();
    const call = this.calls[index];
    call.name += part?.name ?? "";
    call.text += part?.arguments ?? "";
    setText(call.title, call.name);
    setText(call.body, call.text);
  }

  newCall() {
    const call = { name: "", text: "", title: h("code"), body: h("pre"), badge: h("span", { class: "state" }) };
    this.output.append(h("section", { class: "call", "aria-label": "Call" }, h("p", {}, "calls ", call.title, call.badge), call.body));
    return call;
  }

  tell({ ttft, tokens, exact, rate }) {
    setText(this.figures.ttft, seconds(ttft / 1000));
    setText(this.figures.tokens, digits(tokens));
    setText(this.figures.rate, rate === null ? "–" : `${exact ? "" : "~"}${digits(rate)}`);
  }

  // Whether the form is right

  judge(form, reason) {
    const isCut = reason === "length";
    for (const call of this.calls.filter(Boolean)) {
      const schema = form.tools[call.name];
      const verdict = schema === undefined ? { tone: "bad", text: "no such tool" } : verdictOf(call.text, schema, isCut);
      if (verdict.value !== undefined) setText(call.body, JSON.stringify(verdict.value, null, 2));
      call.badge.dataset.tone = verdict.tone;
      setText(call.badge, verdict.text);
    }
    if (form.schema === null) return;
    const { tone, text } = verdictOf(this.text, form.schema, isCut);
    this.verdict.dataset.tone = tone;
    this.verdict.hidden = false;
    setText(this.verdict, text);
  }

  async copyText() {
    const calls = this.calls.filter(Boolean).map(({ name, text }) => `${name}(${text})`);
    try {
      await navigator.clipboard.writeText([this.text, ...calls].filter(Boolean).join("\n"));
      announce("Copied.");
    } catch {
      getSelection().selectAllChildren(this.output);
      announce("Selected: copy it with the keyboard.");
    }
  }
}

/** {tone, text, value}: what to say of a text that shall be JSON of a schema. */
function verdictOf(text, schema, isCut) {
  let value;
  try {
    value = JSON.parse(text);
  } catch {
    return isCut ? { tone: "warn", text: "cut: no whole JSON" } : { tone: "bad", text: "no JSON" };
  }
  const { problem, unchecked } = check(value, schema);
  if (problem) return { tone: "bad", text: `not valid: ${problem}`, value };
  const left = unchecked.length ? ` (not checked here: ${unchecked.join(", ")})` : "";
  return { tone: "good", text: `✓ valid${left}`, value };
}
