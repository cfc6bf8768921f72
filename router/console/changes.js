// Changes of registered adapters, each confirmed in a dialog and sent with the admin key.

import { keys, request } from "./api.js";
import { announce, byId, h, setText } from "./dom.js";
import { spelled } from "./names.js";

const NAME = { name: "name", label: "Name", required: true };
const REFERENCE = { name: "ref", label: "Reference, such as hub:org/name@rev or local:folder", required: true };
const WEIGHT = { name: "weight", label: "Weight, in percent of requests", type: "number", value: "5", min: 0, max: 100, required: true };

/** title, text, verb: for a person. fields: what is typed. ask: [method, route behind the name, body]. */
const CHANGES = {
  register: {
    title: () => "Register an adapter",
    text: "It is fetched and checked first. Requests can name it then.",
    verb: "Register",
    fields: [NAME, REFERENCE, { name: "tenant", label: "Tenant whose name it is (empty: everybody's)" }],
    ask: ({ name, ref, tenant }) => ["POST", null, { name, ref, ...(tenant ? { tenant } : {}) }],
  },
  pin: {
    title: (name) => `Pin ${name}?`,
    text: "It comes to the device of every worker, and stays there. Other adapters have less room.",
    verb: "Pin",
    ask: () => ["POST", "/pin"],
  },
  unpin: {
    title: (name) => `Unpin ${name}?`,
    text: "It may then leave the devices when others need the room.",
    verb: "Unpin",
    ask: () => ["POST", "/unpin"],
  },
  refresh: {
    title: (name) => `Refresh ${name}?`,
    text: "Its reference is read again. If it means another content now, all new requests get that at once.",
    verb: "Refresh",
    ask: () => ["POST", "/refresh"],
  },
  rollout: {
    title: (name) => `Roll out a version of ${name}`,
    text: "It gets its part of the requests once it is on enough devices. It goes back by itself when it does worse.",
    verb: "Roll out",
    fields: [REFERENCE, WEIGHT],
    ask: ({ ref, weight }) => ["POST", "/rollout", { versions: [{ reference: ref, weight: Number(weight) }] }],
  },
  promote: {
    title: (name) => `Promote the new version of ${name}?`,
    text: "It takes the old one's place, for all requests.",
    verb: "Promote",
    ask: () => ["POST", "/promote"],
  },
  rollback: {
    title: (name) => `Take the new version of ${name} back?`,
    text: "All new requests get the old one.",
    verb: "Roll back",
    ask: () => ["POST", "/rollback"],
  },
  remove: {
    title: (name) => `Remove ${name}?`,
    text: "Requests that name it get an error from now on. Running ones finish.",
    verb: "Remove",
    ask: () => ["DELETE", ""],
  },
};

export class Changes {
  /** openKeys: shows the dialog in which the admin key is typed. */
  constructor(openKeys) {
    this.openKeys = openKeys;
    this.dialog = byId("change");
    byId("register").addEventListener("click", () => this.open("register", null));
    byId("change-form").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
  }

  /** The buttons of an adapter as it is. */
  buttons(adapter) {
    const kinds = [adapter.pinned ? "unpin" : "pin", "refresh", "rollout"];
    if (adapter.rollout) kinds.push("promote", "rollback");
    return [...kinds, "remove"].map((kind) => h("button", { class: "small", type: "button", onclick: () => this.open(kind, adapter) }, CHANGES[kind].verb));
  }

  open(kind, adapter) {
    if (!keys.get("admin")) {
      announce("Changes want the admin key.");
      return this.openKeys();
    }
    const { title, text, verb, fields = [] } = CHANGES[kind];
    Object.assign(this, { kind, adapter });
    setText(byId("change-title"), title(adapter && spelled(adapter)));
    setText(byId("change-text"), text);
    setText(byId("change-problem"), "");
    setText(byId("change-do"), verb);
    byId("change-fields").replaceChildren(
      ...fields.map(({ label, ...field }) => h("label", { class: "field" }, h("span", {}, label), h("input", { spellcheck: "false", autocomplete: "off", ...field }))),
    );
    this.busy(false);
    this.dialog.showModal();
  }

  busy(is) {
    byId("change-do").disabled = is;
    setText(byId("change-do"), is ? "Working…" : CHANGES[this.kind].verb);
  }

  async send() {
    const { kind, adapter } = this;
    const typed = Object.fromEntries([...new FormData(byId("change-form"))].map(([name, value]) => [name, value.trim()]));
    const [method, route, body = {}] = CHANGES[kind].ask(typed);
    this.busy(true);
    try {
      await request(route === null ? "v1/adapters" : pathOf(adapter, route), {
        method,
        key: keys.get("admin"),
        headers: { "content-type": "application/json" },
        body: JSON.stringify(body),
      });
      this.dialog.close();
      announce(`${CHANGES[kind].verb}: ${adapter ? spelled(adapter) : typed.name} is done.`);
    } catch (error) {
      setText(byId("change-problem"), error.message);
    } finally {
      this.busy(false);
    }
  }
}

/** The route of one adapter's. */
export function pathOf({ name, tenant }, route) {
  return `v1/adapters/${encodeURIComponent(name)}${route}${tenant ? `?tenant=${encodeURIComponent(tenant)}` : ""}`;
}
