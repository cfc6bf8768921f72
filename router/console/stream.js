// One streamed answer through OpenAI's routes, measured as its reader sees it.

import { events, keys, request } from "./api.js";

/**
 * Streams one model's answer. `onPiece({text, reasoning, calls})` hears of each piece (calls: deltas
 * as OpenAI streams them), `onFigures({ttft, tokens, rate})` of what was measured (milliseconds,
 * tokens, tokens a second). Resolves to the finish reason.
 */
export async function generate(model, call, signal, onPiece, onFigures) {
  const started = performance.now();
  const response = await request(call.mode === "chat" ? "v1/chat/completions" : "v1/completions", {
    method: "POST",
    key: keys.get("api"),
    headers: { "content-type": "application/json", accept: "text/event-stream" },
    body: JSON.stringify(bodyOf(model, call)),
    signal,
  });
  let first = null;
  let last = started;
  let tokens = 0;
  let reason = null;
  const tell = (exact) => {
    const took = (last - first) / 1000;
    onFigures({ ttft: first - started, tokens, exact, rate: tokens > 1 && took > 0 ? (tokens - 1) / took : null });
  };
  for await (const data of events(response)) {
    if (data === "[DONE]") break;
    const event = JSON.parse(data);
    if (event.error) throw new Error(event.error.message);
    const choice = event.choices?.[0];
    const piece = pieceOf(choice);
    if (piece.text || piece.reasoning || piece.calls.length) {
      last = performance.now();
      first ??= last;
      tokens += 1;
      onPiece(piece);
      tell(false);
    }
    reason = choice?.finish_reason ?? reason;
    if (event.usage) tokens = event.usage.completion_tokens;
  }
  if (first !== null) tell(true);
  if (reason === null) throw new Error("The answer broke off.");
  return reason;
}

function pieceOf(choice) {
  const delta = choice?.delta ?? {};
  return {
    text: delta.content ?? choice?.text ?? "",
    reasoning: delta.reasoning ?? delta.reasoning_content ?? "",
    calls: delta.tool_calls ?? [],
  };
}

function bodyOf(model, { mode, prompt, parameters, form, images }) {
  const body = { model, stream: true, stream_options: { include_usage: true }, ...parameters, ...form.body };
  if (mode === "chat") body.messages = [{ role: "user", content: contentOf(prompt, images) }];
  else body.prompt = prompt;
  return body;
}

/** What a message holds: the images, then the text. */
function contentOf(prompt, images) {
  if (!images.length) return prompt;
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return [...parts, { type: "text", text: prompt }];
}
