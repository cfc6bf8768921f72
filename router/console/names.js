// What people know an adapter's content by: its name and its colour, by digest.

import { shortDigest, shortReference } from "./dom.js";

const TURN = 137.508; // degrees: neighbours in the list differ most

/** As the router spells it: a tenant's `sql` is `acme::sql`. */
export const spelled = ({ name, tenant }) => (tenant ? `${tenant}::${name}` : name);

export class Names {
  constructor() {
    this.names = new Map();
    this.order = new Map(); // once given, a colour stays for as long as the page
  }

  /** The first registered name wins, then what a request last called it. */
  learn(fleet) {
    this.names.clear();
    for (const adapter of fleet.adapters) {
      const { digest } = adapter;
      if (!digest) continue;
      if (!this.names.has(digest)) this.names.set(digest, spelled(adapter));
      this.number(digest);
    }
    for (const adapter of fleet.adapters) {
      for (const { digest, reference } of adapter.rollout?.versions ?? []) {
        const name = `${spelled(adapter)} (${shortReference(reference)})`;
        if (!this.names.has(digest)) this.names.set(digest, name);
        this.number(digest);
      }
    }
    for (const worker of fleet.workers) {
      for (const { name, digest } of worker.places) {
        if (name && !this.names.has(digest)) this.names.set(digest, name);
        this.number(digest);
      }
    }
  }

  number(digest) {
    if (!this.order.has(digest)) this.order.set(digest, this.order.size);
    return this.order.get(digest);
  }

  of(digest) {
    return this.names.get(digest) ?? shortDigest(digest);
  }

  /** Whole degrees: browsers remember how a colour is written. */
  hue(digest) {
    return Math.round(265 + this.number(digest) * TURN) % 360;
  }

  /** A colour for style sheets. */
  mark(digest) {
    return `oklch(var(--cell-used-l) var(--cell-used-c) ${this.hue(digest)})`;
  }
}
