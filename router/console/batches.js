// The caller's batches and files: how far each is, what failed, and its end.

import { keys, request } from "./api.js";
import { announce, byId, bytes, digits, h, plural, setText, shortTime } from "./dom.js";

const EVERY_MS = 2000;
const MOST_BATCHES = 100;
const MOST_FILES = 200;
const READ_CHARS = 1 << 16; // of a file of errors
const SHOWN_FAILURES = 20;
const OPEN = ["validating", "in_progress"];
const OFF = { status: 501, message: "The router was started without --files-dir." };
const STATUSES = { in_progress: "running", finalizing: "writing answers", validating: "waiting" };

export class BatchView {
  /** feed: its picture says whether there are batches. openKeys: shows the dialog in which the key is typed. */
  constructor(feed, openKeys) {
    this.feed = feed;
    this.openKeys = openKeys;
    this.rows = new Map(); // by id
    this.seen = false;
    this.asked = 0;
    this.off = false; // as the router has answered, where the picture is locked
    document.addEventListener("visibilitychange", () => this.watch(this.seen));
  }

  /** seen: whether the view is the one that is shown. */
  watch(seen) {
    this.seen = seen;
    this.off = false;
    clearInterval(this.timer);
    if (!seen || document.hidden) return;
    this.timer = setInterval(() => this.ask(), EVERY_MS);
    this.ask();
  }

  async ask() {
    if (!this.seen || this.feed.state === "connecting") return;
    const { fleet } = this.feed;
    if (fleet ? fleet.work.batches === null : this.off) return this.fail(OFF);
    this.asked += 1;
    const { asked } = this;
    try {
      const batches = await ask(`v1/batches?limit=${MOST_BATCHES}`);
      const files = await ask(`v1/files?limit=${MOST_FILES}`);
      if (asked === this.asked) this.show(batches, files);
    } catch (error) {
      if (asked === this.asked) this.fail(error);
    }
  }

  fail({ status, message }) {
    this.off = status === OFF.status;
    const wantsKey = status === 401 || status === 403;
    const title = wantsKey ? "Batches want an API key" : this.off ? "Batches are off" : "No batches are shown";
    const key = `${title} ${message}`;
    const node = byId("batches-notice");
    byId("batches-body").hidden = true;
    node.hidden = false;
    if (node.dataset.key === key) return;
    node.dataset.key = key;
    const button = wantsKey ? h("button", { class: "primary", type: "button", onclick: this.openKeys }, "Type a key") : null;
    node.replaceChildren(h("strong", {}, title), h("p", {}, message), ...(button ? [button] : []));
  }

  show(batches, files) {
    byId("batches-notice").hidden = true;
    byId("batches-body").hidden = false;
    const more = batches.has_more ? " newest" : "";
    setText(byId("batches-count"), `${digits(batches.data.length)}${more}`);
    byId("batches-empty").hidden = batches.data.length > 0;
    const named = new Map(files.data.map((file) => [file.id, file]));
    const wanted = new Set(batches.data.map((batch) => batch.id));
    for (const [id, row] of this.rows) {
      if (wanted.has(id)) continue;
      row.node.remove();
      this.rows.delete(id);
    }
    let before = null;
    for (const batch of batches.data) {
      if (!this.rows.has(batch.id)) this.rows.set(batch.id, new BatchRow(batch.id, () => this.ask()));
      const row = this.rows.get(batch.id);
      row.show(batch, named);
      const place = before === null ? byId("batches").firstChild : before.nextSibling;
      if (place !== row.node) byId("batches").insertBefore(row.node, place);
      before = row.node;
    }
    this.showFiles(files);
  }

  showFiles({ data, has_more: hasMore }) {
    const all = byId("files");
    const key = JSON.stringify(data);
    if (all.dataset.key === key) return;
    all.dataset.key = key;
    setText(byId("files-count"), `${digits(data.length)}${hasMore ? " newest" : ""}`);
    all.replaceChildren(...data.map(fileRow));
  }
}

class BatchRow {
  /** changed: called when something was done to the batch. */
  constructor(id, changed) {
    this.id = id;
    this.changed = changed;
    this.status = h("span", { class: "status" });
    this.about = h("p", { class: "muted small" });
    this.bar = h("progress", { "aria-label": `Lines answered of ${id}` });
    this.lines = h("p");
    this.problem = h("p", { class: "problem" });
    this.trouble = h("p", { class: "problem", role: "alert" });
    this.list = h("div");
    this.failures = h("details", { ontoggle: () => this.readFailures() }, h("summary"), this.list);
    this.cancel = h("button", { type: "button", onclick: () => this.end(), onblur: () => this.calm() }, "Cancel");
    this.answers = h("button", { type: "button", onclick: () => this.save("output_file_id") }, "Save answers");
    this.errors = h("button", { type: "button", onclick: () => this.save("error_file_id") }, "Save errors");
    this.node = h(
      "li",
      { class: "batch", "data-id": id },
      h("div", { class: "head" }, h("h3", {}, id), this.status),
      this.about,
      this.bar,
      this.lines,
      this.problem,
      this.trouble,
      this.failures,
      h("div", { class: "actions" }, this.cancel, this.answers, this.errors),
    );
  }

  show(batch, files) {
    this.batch = batch;
    const { total, completed, failed } = batch.request_counts;
    this.node.dataset.state = batch.status;
    setText(this.status, STATUSES[batch.status] ?? batch.status);
    const input = files.get(batch.input_file_id)?.filename ?? batch.input_file_id;
    setText(this.about, `${batch.endpoint} · ${input} · made ${shortTime(batch.created_at)} · ends by ${shortTime(batch.expires_at)}`);
    this.bar.max = total || 1;
    this.bar.value = completed + failed;
    setText(this.lines, `${digits(completed + failed)} of ${plural(total, "line")} answered`);
    setText(this.problem, (batch.errors?.data ?? []).map(problemText).join(" "));
    this.failures.hidden = !failed;
    setText(this.failures.firstChild, plural(failed, "line") + " failed");
    this.cancel.hidden = !OPEN.includes(batch.status);
    this.answers.hidden = !batch.output_file_id;
    this.errors.hidden = !batch.error_file_id;
  }

  /** The second click ends it. */
  async end() {
    if (!this.sure) {
      this.sure = true;
      setText(this.cancel, "Cancel it now?");
      return;
    }
    this.calm();
    await this.tried(async () => {
      await request(`v1/batches/${this.id}/cancel`, { method: "POST", key: keys.get("api") });
      announce(`${this.id} is being cancelled.`);
    });
    this.changed();
  }

  calm() {
    this.sure = false;
    setText(this.cancel, "Cancel");
  }

  save(name) {
    return this.tried(() => saveFile(this.batch[name]));
  }

  async readFailures() {
    if (!this.failures.open) return;
    const { error_file_id: file } = this.batch;
    if (!file) {
      this.list.replaceChildren(h("p", { class: "muted" }, "They can be read once the batch is over."));
      return;
    }
    await this.tried(async () => {
      const lines = await firstLines(file);
      const left = this.batch.request_counts.failed - Math.min(lines.length, SHOWN_FAILURES);
      const rest = left > 0 ? [h("p", { class: "muted" }, `and ${digits(left)} more`)] : [];
      this.list.replaceChildren(...lines.slice(0, SHOWN_FAILURES).map(failureRow), ...rest);
    });
  }

  async tried(work) {
    try {
      await work();
      setText(this.trouble, "");
    } catch (error) {
      setText(this.trouble, error.message);
    }
  }
}

async function ask(path) {
  const answer = await request(path, { key: keys.get("api") });
  return answer.json();
}

function fileRow(file) {
  const about = [bytes(file.bytes), file.purpose.replaceAll("_", " "), `made ${shortTime(file.created_at)}`];
  if (file.expires_at) about.push(`kept until ${shortTime(file.expires_at)}`);
  const save = () => saveFile(file.id, file.filename).catch((error) => announce(error.message));
  return h(
    "li",
    {},
    h("span", { class: "name" }, file.filename),
    h("span", { class: "muted small" }, about.join(" · ")),
    h("button", { class: "small", type: "button", "aria-label": `Save ${file.filename}`, onclick: save }, "Save"),
  );
}

const problemText = ({ message, line }) => (line ? `Line ${digits(line)}: ${message}` : message);

/** error: of the batch's line; response: what the route answered. */
function failureRow({ custom_id: id, error, response }) {
  const told = error?.message ?? response?.body?.error?.message ?? response?.body?.error ?? `status ${response?.status_code}`;
  return h("p", {}, h("strong", {}, id ?? "a line without custom_id"), `: ${told}`);
}

/** Of a file of errors, as far as a bounded part of it holds them. */
async function firstLines(id) {
  const answer = await request(`v1/files/${id}/content`, { key: keys.get("api") });
  const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  let isWhole = false;
  while (text.length < READ_CHARS && !isWhole) {
    const { value, done } = await reader.read();
    isWhole = done;
    text += value ?? "";
  }
  reader.cancel().catch(() => {});
  const lines = text.split("\n");
  if (!isWhole) lines.pop();
  return lines.filter((line) => line.trim()).map((line) => JSON.parse(line));
}

/** With the key in a header, which a plain link cannot send. */
async function saveFile(id, name = `${id}.jsonl`) {
  const answer = await request(`v1/files/${id}/content`, { key: keys.get("api") });
  const url = URL.createObjectURL(await answer.blob());
  h("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 0);
}
