// The router's HTTP API: keys, errors, event streams.

const NAMES = { admin: "loraplex.admin-key", api: "loraplex.api-key" };

/** Keys live in this tab's sessionStorage; they are never put into a URL. */
export const keys = {
  get: (kind) => sessionStorage.getItem(NAMES[kind]) ?? "",
  set(kind, value) {
    if (value) sessionStorage.setItem(NAMES[kind], value);
    else sessionStorage.removeItem(NAMES[kind]);
  },
};

/** What the router said instead of an answer. status 0: it could not be reached. */
export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export async function request(path, { key, ...options } = {}) {
  const headers = { ...options.headers };
  if (key) headers.authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The router cannot be reached.");
  }
  if (!response.ok) throw new ApiError(response.status, await messageOf(response));
  return response;
}

async function messageOf(response) {
  try {
    const body = await response.json();
    return body.error?.message ?? body.error ?? `HTTP ${response.status}`;
  } catch {
    return `HTTP ${response.status}`;
  }
}

/** The data of each server-sent event, as text. `onBytes` hears of every sign of life. */
export async function* events(response, onBytes = () => {}) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  const pending = []; // pieces of an event whose end has not come: they are joined once
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      onBytes();
      if (!value.includes("\n")) {
        pending.push(value);
        continue;
      }
      const parts = (pending.splice(0).join("") + value).split("\n\n");
      pending.push(parts.pop());
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data:"));
        if (data.length) yield data.map((line) => line.slice(5).trimStart()).join("\n");
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
