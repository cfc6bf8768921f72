// The form that answers shall have: any text, JSON of a schema, or calls of tools.

import { byId, setText } from "./dom.js";

const TEXTS = { schema: "schema", tools: "tools" };
const EXAMPLES = {
  schema: {
    type: "object",
    properties: {
      name: text(40),
      intent: { enum: ["order", "cancel", "refund", "complaint", "delivery", "address", "question", "thanks", "invoice"] },
      product: text(40),
      quantity: { type: ["integer", "null"], minimum: 1, maximum: 999 },
      order: text(12),
      city: text(40),
    },
    required: ["name", "intent", "product", "quantity", "order", "city"],
    additionalProperties: false,
  },
  tools: [
    tool("place_order", { product: { type: "string" }, quantity: { type: "integer" }, city: { type: "string" } }),
    tool("cancel_order", { order: { type: "string" }, product: { type: "string" } }),
    tool("report_problem", { order: { type: "string" }, product: { type: "string" } }),
  ],
};

function text(maxLength) {
  return { type: ["string", "null"], maxLength };
}

function tool(name, properties) {
  return { type: "function", function: { name, parameters: { type: "object", properties } } };
}

export class AnswerForm {
  /** onKind: hears of the kind that was chosen. */
  constructor(onKind) {
    this.problem = "";
    byId("form").addEventListener("change", () => {
      this.show();
      onKind(this.kind);
    });
    for (const id of Object.values(TEXTS)) byId(id).addEventListener("input", () => this.tell(null, ""));
    this.show();
  }

  get kind() {
    return byId("form").value;
  }

  /** Shows what belongs to the kind. An empty text begins with an example. */
  show() {
    for (const node of document.querySelectorAll("#shape [data-form]")) node.hidden = node.dataset.form !== this.kind;
    const text = TEXTS[this.kind] && byId(TEXTS[this.kind]);
    if (text && !text.value.trim()) text.value = JSON.stringify(EXAMPLES[this.kind], null, 2);
    this.tell(null, "");
  }

  /**
   * What to send: {body, schema, tools}; null where it cannot be sent, and `problem` says why.
   * schema: a value's, or null; tools: parameters by the tool's name.
   */
  read(mode) {
    this.tell(null, "");
    if (this.kind === "schema") return this.readSchema();
    if (this.kind === "tools") return this.readTools(mode);
    return { body: {}, schema: null, tools: {} };
  }

  readSchema() {
    const schema = this.parsed("schema");
    if (schema === undefined) return null;
    if (!isObject(schema)) return this.tell("schema", "The schema must be a JSON object.");
    const format = { type: "json_schema", json_schema: { name: "answer", schema, strict: true } };
    return { body: { response_format: format }, schema, tools: {} };
  }

  readTools(mode) {
    if (mode !== "chat") return this.tell("tools", "Tools need the prompt as a chat message.");
    const tools = this.parsed("tools");
    if (tools === undefined) return null;
    if (!Array.isArray(tools) || !tools.length) return this.tell("tools", "Tools must be a JSON list of at least one tool.");
    const at = tools.findIndex((one) => typeof one?.function?.name !== "string");
    if (at >= 0) return this.tell("tools", `Tool ${at + 1} must be {"type": "function", "function": {"name": …, "parameters": …}}.`);
    const schemas = Object.fromEntries(tools.map((one) => [one.function.name, one.function.parameters ?? true]));
    return { body: { tools, tool_choice: byId("tool-choice").value }, schema: null, tools: schemas };
  }

  parsed(id) {
    try {
      return JSON.parse(byId(id).value);
    } catch (error) {
      this.tell(id, `This is no JSON: ${error.message}`);
      return undefined;
    }
  }

  tell(id, problem) {
    this.problem = problem;
    setText(byId("form-problem"), problem);
    for (const other of Object.values(TEXTS)) byId(other).setAttribute("aria-invalid", String(other === id));
    if (id) {
      byId("shape").open = true;
      byId(id).focus();
    }
    return null;
  }

  // The link

  remember(query) {
    if (this.kind === "text") return;
    query.set("form", this.kind);
    query.set(this.kind, byId(TEXTS[this.kind]).value);
    if (this.kind === "tools") query.set("calls", byId("tool-choice").value);
  }

  restore(given) {
    const kind = given.get("form");
    if (!Object.hasOwn(TEXTS, kind ?? "")) return;
    byId("form").value = kind;
    byId(TEXTS[kind]).value = given.get(kind) ?? "";
    if (["auto", "required"].includes(given.get("calls"))) byId("tool-choice").value = given.get("calls");
    byId("shape").open = true;
    this.show();
  }
}

function isObject(value) {
  return typeof value === "object" && value !== null && !Array.isArray(value);
}
