// A list of thousands of rows of which only those in sight exist. Keyboard as in any listbox.

import { h, setAttribute, setText } from "./dom.js";

const SPARE = 6;

/**
 * items: [{id, title, detail, mark?, badge?, selected}]; `onPick(item)` on click, Enter or space.
 */
export class VirtualList {
  constructor(label, rowHeight, { multiple = false, empty, onPick }) {
    this.rowHeight = rowHeight;
    this.onPick = onPick;
    this.items = [];
    this.active = null; // an id
    this.rows = [];
    this.prefix = `list-${Math.random().toString(36).slice(2, 8)}`;
    this.sizer = h("div", { class: "list-sizer", role: "presentation" });
    this.empty = h("p", { class: "empty" }, empty);
    this.box = h(
      "div",
      {
        class: "list",
        role: "listbox",
        tabindex: "0",
        "aria-label": label,
        "aria-multiselectable": multiple ? "true" : null,
        onscroll: () => this.draw(),
        onkeydown: (event) => this.key(event),
        onfocus: () => this.activate(this.active ?? this.items[0]?.id ?? null, false),
      },
      this.sizer,
    );
    this.node = h("div", { class: "list-holder" }, this.box, this.empty);
    new ResizeObserver(() => this.activate(this.active)).observe(this.box);
  }

  show(items, emptyText = null) {
    this.items = items;
    if (emptyText !== null) setText(this.empty, emptyText);
    this.empty.hidden = items.length > 0;
    this.box.hidden = !items.length;
    if (!items.some((item) => item.id === this.active)) this.active = null;
    this.sizer.style.height = `${items.length * this.rowHeight}px`;
    this.draw();
  }

  draw() {
    const from = Math.max(0, Math.floor(this.box.scrollTop / this.rowHeight) - SPARE);
    const seen = Math.ceil(this.box.clientHeight / this.rowHeight) + 2 * SPARE;
    const shown = this.items.slice(from, from + seen);
    while (this.rows.length < shown.length) this.rows.push(this.row());
    this.rows.forEach((row, i) => this.fill(row, shown[i], from + i));
    setAttribute(this.box, "aria-activedescendant", this.activeIndex < 0 ? null : this.idOf(this.activeIndex));
  }

  row() {
    const [mark, title, detail, badge] = ["mark", "title", "detail", "badge"].map((name) =>
      h("span", { class: name }),
    );
    const node = h("div", { class: "row", role: "option" }, mark, h("span", { class: "words" }, title, detail), badge);
    const row = { node, mark, title, detail, badge, item: null };
    node.addEventListener("click", () => {
      this.activate(row.item.id, false);
      this.onPick(row.item);
    });
    this.sizer.append(node);
    return row;
  }

  fill(row, item, index) {
    row.node.hidden = !item;
    row.item = item;
    if (!item) {
      for (const name of ["id", "aria-selected"]) row.node.removeAttribute(name);
      return;
    }
    row.node.style.transform = `translateY(${index * this.rowHeight}px)`;
    setAttribute(row.node, "id", this.idOf(index));
    setAttribute(row.node, "aria-selected", item.selected ? "true" : "false");
    setAttribute(row.node, "aria-posinset", index + 1);
    setAttribute(row.node, "aria-setsize", this.items.length);
    row.node.classList.toggle("active", item.id === this.active);
    row.mark.style.background = item.mark ?? "transparent";
    setText(row.title, item.title);
    setText(row.detail, item.detail);
    setText(row.badge, item.badge ?? "");
    row.badge.dataset.tone = item.tone ?? "";
  }

  idOf(index) {
    return `${this.prefix}-${index}`;
  }

  get activeIndex() {
    return this.items.findIndex((item) => item.id === this.active);
  }

  activate(id, scroll = true) {
    this.active = id;
    const top = this.activeIndex * this.rowHeight;
    if (scroll && top >= 0) {
      const { scrollTop, clientHeight } = this.box;
      if (top < scrollTop) this.box.scrollTop = top;
      else if (top + this.rowHeight > scrollTop + clientHeight) this.box.scrollTop = top + this.rowHeight - clientHeight;
    }
    this.draw();
  }

  key(event) {
    const page = Math.max(1, Math.floor(this.box.clientHeight / this.rowHeight) - 1);
    const last = this.items.length - 1;
    const now = this.activeIndex;
    const moves = { ArrowDown: now + 1, ArrowUp: now - 1, PageDown: now + page, PageUp: now - page, Home: 0, End: last };
    if (event.key in moves) {
      const index = Math.max(0, Math.min(last, moves[event.key]));
      this.activate(this.items[index]?.id ?? null);
    } else if ((event.key === "Enter" || event.key === " ") && now >= 0) {
      this.onPick(this.items[now]);
    } else return;
    event.preventDefault();
  }
}
